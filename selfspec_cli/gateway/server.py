"""A gateway that serves: made of its settings, run by uvicorn, and ended without losing a request."""

from __future__ import annotations

import gc
import math
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.asked import ENDPOINTS
from selfspec_cli.gateway.caching import Caching
from selfspec_cli.gateway.client import Client, Receive, Scope, Send, Vanished, read_body
from selfspec_cli.gateway.control import control
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.errors import GatewayError
from selfspec_cli.gateway.judging import judge
from selfspec_cli.gateway.log import FILE, RequestLog
from selfspec_cli.gateway.settings import CacheSettings, GatewaySettings
from selfspec_cli.gateway.supervisor import Supervisor, replica
from selfspec_cli.gateway.upstream import Upstream
from selfspec_cli.record.gateway_log import FOLDER

if TYPE_CHECKING:
    from selfspec_cli.gateway.cache import AnswerCache

CACHE = "cache.sqlite"
BACKLOG = 4096
Say = Callable[[str], None]


def made(settings: GatewaySettings) -> Gateway:
    """The gateway of these settings, before it is opened; raises ConfigError."""
    folder = Path(settings.results_dir) / FOLDER
    log = RequestLog(Path(settings.log) if settings.log else folder / FILE, settings.log_text)
    replicas, upstream = [replica(one) for one in settings.backends], Upstream(settings.limits)
    judges = [one for one in replicas if one.name == settings.cache.judge]
    found = _cache(settings.cache, folder, judge(upstream, judges[0]) if judges else None)
    return Gateway(settings, replicas, upstream, log, Caching(settings.cache, found, log.fault))


def _cache(settings: CacheSettings, folder: Path, judged_by: Any) -> AnswerCache | None:
    if settings.kind == "none":
        return None
    from selfspec_cli.gateway import cache

    folder.mkdir(parents=True, exist_ok=True)
    return cache.AnswerCache(folder / CACHE, settings.options, judged_by)


def application(gateway: Gateway) -> Callable[[Scope, Receive, Send], object]:
    """ASGI: the endpoints of models go to the gateway itself, everything else to the control surface."""
    surface, limits = control(gateway), gateway.settings.limits

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ENDPOINTS:
            await gateway(scope, receive, send)
        elif scope["type"] == "http":
            try:
                body = await read_body(receive, int(limits.body_mib * 2**20), limits.unread_seconds)
            except GatewayError as error:
                await Client(send, {}).fail(error)
            except Vanished:
                pass
            else:
                await surface(scope, _after(body, receive), send)

    return app


def _after(body: bytes, receive: Receive) -> Receive:
    """What comes of a request whose body has been read: the body, and then the rest."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return first.pop() if first else await receive()

    return again


@asynccontextmanager
async def opened(gateway: Gateway, say: Say = lambda text: None) -> AsyncIterator[Supervisor]:
    """A gateway with its client, its log, and its backends, for as long as the block lasts."""
    folder = Path(gateway.settings.results_dir) / FOLDER

    judges = [one for one in gateway.replicas if one.name == gateway.settings.cache.judge]

    def looked() -> None:
        gateway.batch.look()
        if any(one.available() and one.idle() for one in judges):  # otherwise answers wait on
            gateway.caching.settle()

    supervisor = Supervisor(gateway.replicas, gateway.upstream, folder, looked, say)
    gateway.log.open()
    try:
        await supervisor.open()
        yield supervisor
    finally:
        await supervisor.close()
        gateway.upstream.close()
        await gateway.log.close()
        gateway.tracing.close()
        if gateway.caching.cache is not None:
            gateway.caching.cache.close()


class _Server(uvicorn.Server):
    """uvicorn's, which tells the gateway when it is asked to end, so that no new request is begun."""

    gateway: Gateway
    say: Say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; says where it listens once it does, with the port that it got."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self.say(f"listening on http://{self.gateway.settings.host}:{port}/v1")

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
    config = uvicorn.Config(
        application(gateway),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.limits.drain_seconds),
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
    )
    found = _Server(config)
    found.gateway, found.say = gateway, say
    return found


def serve(settings: GatewaySettings, say: Say) -> None:
    """Run a gateway until a signal ends it.

    Raises:
        ConfigError: what the settings ask for cannot be had, such as the port.
    """

    async def run() -> None:
        gateway = made(settings)
        async with opened(gateway, say):
            gc.collect()
            gc.freeze()  # what is there now stays: collections need not look at it again while tokens wait
            await server(gateway, say).serve()

    import uvloop

    try:
        uvloop.run(run())
    except SystemExit as error:  # uvicorn's, where it cannot listen
        raise ConfigError(f"port={settings.port}: it cannot listen on {settings.host}:{settings.port}") from error
