"""Asking a backend: one HTTP client for all, and what counts as a failure of the backend's."""

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.backends.base import without_v1
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import RESPONSES, Request
from selfspec_cli.gateway.settings import LimitSettings
from selfspec_cli.gateway.wire import BrokenStream, bad_request, dumps, unavailable

OWN_FAULT = (401, 403, 407)
"""The gateway's key for that backend is wrong: no client sees the error, another backend is asked."""
PASSED_ON = (429, 500, 502, 503, 504)
"""What a client may get as it is; anything else that is no answer is 502."""
LONGEST_BACKOFF = 60.0  # seconds of a Retry-After that is honoured
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 5.0  # for a page of a backend's own, such as /health
KEPT_SECONDS = 30.0  # for which a connection that nobody uses is kept
ERROR_BYTES, ANSWER_BYTES = 1 << 20, 1 << 28  # that are read of an error, and of an answer in one piece
OWN_HEADERS = {"accept-encoding": "identity", "content-type": "application/json"}
BATCH_PRIORITY = 10  # of vLLM: smaller goes first, and interactive requests have 0


class Cause(StrEnum):
    """Whose fault a failure is. backend: the backend's. shared: the backend's if another one can answer the same
    request, otherwise the request's. nobody: no breaker counts it."""

    backend = "backend"
    shared = "shared"
    nobody = "nobody"


class BackendFailed(Exception):
    """A backend gave no answer: it was not reached, took too long, or answered with an error of its own. retry_after:
    seconds for which it asks to be left alone."""

    def __init__(self, message: str, status: int = 502, cause: Cause = Cause.shared, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.cause, self.retry_after = status, cause, retry_after


class Refused(Exception):
    """A backend refused the request itself (HTTP 4xx): the client gets that, or a cascade's unsure answer."""

    def __init__(self, status: int, raw: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.raw = status, raw


class Upstream:
    """The client of all backends; `close` after the last request."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def _session(self, method: str) -> aiohttp.ClientSession:
        """A client of aiohttp, made inside the event loop when it is first used. Looks (GET) have one of their own:
        otherwise they would use in turn all connections that a rush of requests left, and none would ever be closed."""
        if method not in self._sessions:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            self._sessions[method] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[tracing],
            )
        return self._sessions[method]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def get(self, replica: Replica, path: str, seconds: float = LOOK_SECONDS) -> bytes:
        """The body of a page; raises BackendFailed."""
        url = address(replica.url, path)
        async with self._asked("GET", url, key_of(replica), None, seconds) as response:
            if response.status != 200:
                raise BackendFailed(f"HTTP {response.status}", response.status)
            try:
                return await self.whole(response, seconds)
            except BrokenStream as error:
                raise BackendFailed(str(error)) from error

    @asynccontextmanager
    async def post(
        self,
        replica: Replica,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
        base: str | None = None,
        seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose head has come and says 200. base: an address in place of the backend's own. seconds: until
        the head; None takes limits.first_byte_seconds. Raises BackendFailed, and Refused for HTTP 4xx."""
        try:
            raw = dumps(body)
        except ValueError as error:
            raise bad_request(f"the body cannot be handed on: {error}") from error
        seconds = self.limits.first_byte_seconds if seconds is None else seconds
        url, own = address(base or replica.url, path), {**key_of(replica), **headers}
        async with self._asked("POST", url, own, raw, seconds) as response:
            if response.status != 200:
                await self._refuse(response)
            yield response

    @asynccontextmanager
    async def _asked(
        self, method: str, url: str, headers: Mapping[str, str], data: bytes | None, seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose head came in time; raises BackendFailed. If it is not read to its end, the backend stops."""
        try:
            async with asyncio.timeout(seconds):
                response = await self._sent(method, url, headers, data)
        except aiohttp.ConnectionTimeoutError as error:
            raise BackendFailed(f"not connected in {CONNECT_SECONDS:g} s", cause=Cause.backend) from error
        except TimeoutError as error:
            raise BackendFailed(f"no answer in {seconds:g} s", 504) from error
        except aiohttp.ClientConnectorError as error:
            raise BackendFailed(_said(error), cause=Cause.backend) from error
        except aiohttp.ClientError as error:
            raise BackendFailed(_said(error)) from error
        try:
            yield response
        finally:
            response.release()

    async def _sent(
        self, method: str, url: str, headers: Mapping[str, str], data: bytes | None
    ) -> aiohttp.ClientResponse:
        """A response. A kept connection that was closed meanwhile is no failure: the next one is taken. Where this
        process has no file descriptors left, that is no backend's failure: raises GatewayError (503)."""
        target, own = URL(url, encoded=True), {**OWN_HEADERS, **headers}
        while True:
            note = SimpleNamespace(reused=False)
            try:
                return await self._session(method).request(
                    method, target, headers=own, data=data, allow_redirects=False, trace_request_ctx=note
                )
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
                    raise unavailable("the gateway has no file descriptors left") from error
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not note.reused:
                    raise

    async def _refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        raw, status = b"", response.status
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(self.limits.stall_seconds):
                while len(raw) < ERROR_BYTES and (part := await response.content.readany()):
                    raw += part
        if status in OWN_FAULT:
            raise BackendFailed(f"HTTP {status}: it does not take the gateway's key", cause=Cause.backend)
        if 400 <= status < 500 and status not in (408, 429):
            raise Refused(status, raw)
        cause, later = Cause.nobody if status == 429 else Cause.shared, response.headers.get("retry-after", "")
        raise BackendFailed(f"HTTP {status}", status if status in PASSED_ON else 502, cause, _seconds(later))

    async def part(self, response: aiohttp.ClientResponse, seconds: float) -> bytes:
        """The next bytes of an answer, empty at its end. Raises BrokenStream, also if none come in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await response.content.readany()
        except TimeoutError as error:
            raise BrokenStream("nothing came in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenStream(_said(error)) from error

    async def whole(self, response: aiohttp.ClientResponse, seconds: float) -> bytes:
        """All bytes of an answer. Raises BrokenStream where they do not come within `seconds`, or are too many."""
        until, raw = time.monotonic() + seconds, bytearray()
        while part := await self.part(response, max(0.0, until - time.monotonic())):
            raw += part
            if len(raw) > ANSWER_BYTES:
                raise BrokenStream(f"the answer has more than {ANSWER_BYTES >> 20} MiB")
        return bytes(raw)


async def _note_reuse(session: Any, context: SimpleNamespace, params: Any) -> None:
    context.trace_request_ctx.reused = True


def _said(error: Exception) -> str:
    """A failure in words, without the address of the backend."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"not connected: {error.os_error.strerror or type(error.os_error).__name__}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _seconds(text: str) -> float:
    """Of a Retry-After header; 0 where it names a date or nothing."""
    return min(float(text), LONGEST_BACKOFF) if text.isascii() and text.isdigit() else 0.0


def address(base: str, path: str) -> str:
    """Where a request goes. base: HOST, or HOST/v1; any other path stands in place of /v1, and a query is kept, as in
    https://HOST/openai/deployments/NAME?api-version=1. path: begins with /v1, unless it is a page of the server's."""
    parts = urlsplit(base)
    if parts.path.rstrip("/") in ("", "/v1") and not parts.query:
        return without_v1(base) + path
    return parts._replace(path=parts.path.rstrip("/") + path.removeprefix("/v1")).geturl()


def key_of(replica: Replica) -> dict[str, str]:
    """The headers with the key for a backend; Azure's, which is known by its query, has another name."""
    name = replica.settings.key_env
    if name is None:
        return {}
    azure = {"api-key": os.environ[name]} if "api-version=" in replica.url else {}
    return {"Authorization": f"Bearer {os.environ[name]}", **azure}


async def prepared(upstream: Upstream, replica: Replica, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body once what its kind of backend does beforehand is done (`split` lets another server prefill)."""
    before = BACKENDS[replica.settings.kind].before
    return body if before is None else await before(upstream, replica, path, body)


def outgoing(
    request: Request, replica: Replica, path: str, body: dict[str, Any], *, ids: bool, plain: bool
) -> dict[str, Any]:
    """A request's body as one backend gets it. ids: token ids are wanted. plain: without drafts."""
    made = {**body, "model": request.model if request.model in replica.models else replica.model or request.model}
    if request.stream:
        made["stream"] = True
        if path != RESPONSES:
            made["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if ids and replica.vllm:
            made["return_token_ids"] = True
    if replica.priorities():
        default = BATCH_PRIORITY * (request.kind == "batch")
        made["priority"] = request.priority if request.priority is not None else default
    if plain and replica.load.drafts:
        made["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), "selfspec_k": 0}
    return made
