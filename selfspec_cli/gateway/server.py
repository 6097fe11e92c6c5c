"""A gateway that serves: run by uvicorn with limits for connections of clients, and ended without losing a request."""

import asyncio
import ctypes
import gc
import ipaddress
import re
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway.client import Client, Receive, Scope, Send, Vanished
from selfspec_cli.gateway.control import control
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.limits import NOBODY
from selfspec_cli.gateway.request import NEEDED, request_id
from selfspec_cli.gateway.settings import GatewaySettings, KeySettings
from selfspec_cli.gateway.supervisor import Supervisor, replica
from selfspec_cli.gateway.wire import GatewayError, invalid

SMALL_BODY = 1 << 16  # bytes of a body that needs no key, or is none of a model's
DRAIN_SECONDS = 30  # for requests in flight to end when the gateway ends
IDLE_SECONDS = 75  # for which a connection without a request is kept
OPEN_TO_ALL = ("/health", "/metrics")
FOR_EVERY_KEY = ("/v1/models", "/gateway/feedback")
LOCAL = ("localhost", "127.0.0.1", "::1")
BACKLOG = 4096
MAP_THRESHOLD, MAPPED_BYTES = -3, 1 << 17  # of glibc's mallopt
HEAD_BYTES = 1 << 16  # of a request's line and headers together
HEAD_SECONDS = 20.0  # from the connection, or from the first byte of a later request, to the end of the head
SPARE_FILES = 256  # descriptors that are no client's and no backend's
WANTED_FILES = 65_536
_HTTP2 = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""Java's HttpClient offers HTTP/2 in this way, and sends its body all the same; as an upgrade it would not be read."""
_TOO_MANY, _TOO_LARGE = "503 Service Unavailable\r\nretry-after: 1", "431 Request Header Fields Too Large"
Say = Callable[[str], None]


def most_connections() -> int:
    """Clients at once, at two file descriptors each, once the limit of this process is raised as far as may be."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    files = WANTED_FILES if limit == resource.RLIM_INFINITY else limit
    if files < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            files = wanted
    return max(16, (files - SPARE_FILES) // 2)


class Doors(HttpToolsProtocol):
    """The connections of clients: uvicorn's protocol, with limits of how long a head may take, how large it may be, and
    how many there may be. most: connections, set by the server."""

    most = 1 << 30
    _head = 0  # bytes of the head that comes now
    _fields = 0  # of its headers
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(_TOO_MANY)
        else:
            self._wait()

    def _refuse(self, status: str) -> None:
        """Answer without a request, and close."""
        head = f"HTTP/1.1 {status}\r\nx-request-id: {request_id('')}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request")

    def _wait(self) -> None:
        self._alarm = self.loop.call_later(HEAD_SECONDS, self._close)

    def _close(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            if self._alarm is None:
                self._wait()
            self._head += len(data)
            data = _HTTP2.sub(b"", data)
        super().data_received(data)
        if self._alarm is not None and self._head > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head, fields, self._fields = 0, self._fields, 0
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if fields > HEAD_BYTES:
            return self._refuse(_TOO_LARGE)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        super().connection_lost(exc)


def application(gateway: Gateway) -> Callable[[Scope, Receive, Send], Any]:
    """ASGI: the endpoints of models go to the gateway itself, everything else to the control surface. The key is looked
    at before the body, and every answer has an x-request-id."""
    surface = control(gateway)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant = admitted(gateway, scope)
            if scope["path"] in NEEDED:
                return await gateway(scope, receive, send, tenant)
            body = await gateway.memory.read(receive, SMALL_BODY, gateway.settings.limits.unread_seconds)
            gateway.memory.free(len(body))
        except GatewayError as error:
            await Client(send, {"connection": "close"}).fail(error)
        except Vanished:
            pass
        else:
            first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> MutableMapping[str, Any]:
                return first.pop() if first else await receive()

            await surface({**scope, "tenant": tenant}, again, send)

    app: Any = answer
    if gateway.settings.origins:
        from starlette.middleware.cors import CORSMiddleware

        shown = ["x-request-id", "x-selfspec-backend", "x-selfspec-cache"]
        app = CORSMiddleware(answer, gateway.settings.origins, ["*"], ["*"], expose_headers=shown)

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        own = (b"x-request-id", request_id(Headers(scope=scope).get("x-request-id", "")).encode())
        scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != own[0]), own]

        async def hand_on(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        await app(scope, receive, hand_on)

    return named


def admitted(gateway: Gateway, scope: Scope) -> KeySettings:
    """Who asks, before the body is read. Raises GatewayError: no key that may ask here (401, 403), a method that is not
    allowed (405), or a control endpoint asked by another page, by its origin or its own name of this host (403)."""
    path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
    if path in OPEN_TO_ALL:
        return NOBODY
    tenant = gateway.keys.tenant(headers.get("authorization", ""))
    if path in NEEDED:
        if method != "POST":
            raise invalid(f"{method} is not allowed here; allowed: POST", 405, headers={"allow": "POST"})
        return tenant
    if not tenant.admin and path not in FOR_EVERY_KEY and not path.startswith("/v1/models/"):
        raise GatewayError(f"{path} needs a key with admin: true", 403, "permission_error")
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and origin not in gateway.settings.origins and origin.partition("://")[2] != host:
        raise GatewayError(f"a page of {origin} may not ask here: origins", 403, "permission_error")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if gateway.keys.everybody and name not in (*LOCAL, gateway.settings.host) and not _is_number(name):
        said = f"without keys the control endpoints answer at {', '.join(LOCAL)} alone, and not at {name}"
        raise GatewayError(said, 403, "permission_error")
    return tenant


def _is_number(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


@asynccontextmanager
async def opened(gateway: Gateway, say: Say = lambda text: None, starts: bool = True) -> AsyncIterator[Supervisor]:
    """A gateway with its client, its log, and its backends, for as long as the block lasts. starts: servers too."""
    supervisor = Supervisor(gateway.upstream, gateway.folder, gateway.looked, say, starts)
    try:
        await supervisor.take(gateway.replicas)
        yield supervisor
    finally:
        await supervisor.close()
        await gateway.upstream.close()
        gateway.log.close()
        gateway.tracing.close()
        gateway.caching.close()
        gateway.meter.close()


class _Server(uvicorn.Server):
    """uvicorn's, which tells the gateway when it is asked to end, so that no new request is begun."""

    gateway: Gateway
    say: Say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; says where it listens once it does, with the port that it got."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            scheme, host = "https" if self.config.is_ssl else "http", self.gateway.settings.host
            warning = f"; warning: without keys, everybody who reaches {host} may ask and control"
            open_to_all = self.gateway.keys.everybody and host not in LOCAL
            self.say(f"listening on {scheme}://{host}:{port}/v1" + (warning if open_to_all else ""))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising them again in the end: the servers that were started are still to be ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.gateway.draining = True
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def server(gateway: Gateway, say: Say = lambda text: None) -> uvicorn.Server:
    """uvicorn for a gateway; with uvloop and httptools, which the extra `gateway` brings. say: where it listens."""
    settings = gateway.settings
    certificate, key = settings.tls or (None, None)
    config = uvicorn.Config(
        application(gateway),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=type("Doors", (Doors,), {"most": most_connections()}),
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=BACKLOG,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        server_header=False,
        proxy_headers=False,
    )
    found = _Server(config)
    found.gateway, found.say = gateway, say
    return found


async def reload(gateway: Gateway, supervisor: Supervisor, settings: GatewaySettings) -> None:
    """Go on with other settings; requests in flight end at the backends where they are. Address, TLS, origins and
    folder stay what they were, and so does whether there is a cache. Raises ConfigError: another number of workers."""
    if settings.workers != gateway.settings.workers:
        raise ConfigError(f"workers={settings.workers}: it is {gateway.settings.workers} until a restart")
    known = {one.name: one for one in gateway.replicas}
    gateway.routing.replicas = [
        old if (old := known.get(one.name)) and old.settings == one else replica(one) for one in settings.backends
    ]
    gateway.take(settings)
    await supervisor.take(gateway.replicas)


def at_hang_up(reload_settings: Callable[[], Awaitable[None]], say: Say) -> None:
    """Have SIGHUP reload the settings, in the running event loop."""

    async def reloaded() -> None:
        try:
            await reload_settings()
        except (ConfigError, SettingsError) as error:
            say(f"the settings stay as they were: {error}")
        else:
            say("the settings were reloaded")

    running: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive

    def hang_up() -> None:
        task = asyncio.ensure_future(reloaded())
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


def prepare_memory() -> None:
    """Have the memory of long bodies go back to the system: by itself glibc takes ever larger blocks from the heap,
    where one small block keeps all below it. What is there now stays: no collection looks at it while tokens wait."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(MAP_THRESHOLD, MAPPED_BYTES)
    gc.collect()
    gc.freeze()


def serve(settings: GatewaySettings, say: Say, again: Callable[[], GatewaySettings]) -> None:
    """Run a gateway until a signal ends it. again: reads the settings anew, at SIGHUP. Raises ConfigError for what
    cannot be had, such as the port."""

    async def run() -> None:
        gateway = Gateway(settings)
        async with opened(gateway, say) as supervisor:
            at_hang_up(lambda: reload(gateway, supervisor, again()), say)
            prepare_memory()
            await server(gateway, say).serve()

    import uvloop

    try:
        uvloop.run(run())
    except SystemExit as error:  # uvicorn's, where it cannot listen
        raise ConfigError(f"port={settings.port}: it cannot listen on {settings.host}:{settings.port}") from error
