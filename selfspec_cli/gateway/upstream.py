"""Asking a backend: one HTTP client for all, and what counts as a failure of the backend's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from selfspec_cli.gateway.asked import Asked
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.events import BrokenStream
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.settings import LimitSettings

FAILED = (429, 500, 502, 503, 504)
"""Of HTTP: another backend is asked."""
OWN_FAULT = (401, 403)
"""The gateway's key for that backend is wrong: no client sees the error, another backend is asked."""
ERROR_BYTES = 1 << 20
BATCH_PRIORITY = 10  # of vLLM: smaller goes first, and interactive requests have 0


class BackendFailed(Exception):
    """A backend gave no answer: it was not reached, took too long, or answered with an error of its own.

    counts: whether it was the backend's fault, for the circuit breaker.
    """

    def __init__(self, message: str, status: int = 502, *, counts: bool = True, raw: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.counts, self.raw = status, counts, raw


class Refused(Exception):
    """A backend refused the request itself (HTTP 4xx): the client gets the error, and nobody else is asked."""

    def __init__(self, status: int, raw: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.raw = status, raw


class Upstream:
    """The HTTP client; `open` before the first request, `close` after the last."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the client, inside a running event loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_seconds)
        self.session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 16,
                                             auto_decompress=False, trust_env=False)  # fmt: skip

    async def close(self) -> None:
        """Close every connection."""
        if self.session is not None:
            await self.session.close()

    async def get(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a page; raises BackendFailed."""
        assert self.session is not None
        try:
            async with asyncio.timeout(seconds), self.session.get(url, headers=headers) as response:
                if response.status != 200:
                    raise BackendFailed(f"HTTP {response.status}", response.status)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendFailed(f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def post(
        self, replica: Replica, path: str, body: dict[str, Any], headers: Mapping[str, str], base: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose head has come and says 200. base: of another address than the backend's own.

        Raises:
            BackendFailed: no answer, or an error of the backend's. Refused: HTTP 4xx.
        """
        assert self.session is not None
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **key_of(replica), **headers}
        try:
            async with asyncio.timeout(self.limits.first_byte_seconds):
                response = await self.session.post((base or replica.url) + path, data=orjson.dumps(body), headers=sent)
        except TimeoutError as error:
            raise BackendFailed(f"no answer in {self.limits.first_byte_seconds:g} s", 504) from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendFailed(f"{type(error).__name__}: {error}") from error
        try:
            if response.status != 200:
                await self._refuse(response)
            yield response
        finally:
            if not response.content.at_eof():
                response.close()  # what is left of the answer is not wanted: the backend stops working on it
            response.release()

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(self.limits.stall_seconds):
                raw = await response.content.read(ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            raw = b""
        status = response.status
        if 400 <= status < 500 and status not in FAILED + OWN_FAULT:
            raise Refused(status, raw)
        raise BackendFailed(f"HTTP {status} {raw[:200].decode(errors='replace')}".strip(), status,
                            counts=status != 429, raw=raw)  # fmt: skip

    async def parts(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """What comes of an answer, as it comes; raises BrokenStream where it breaks off or stalls."""
        content, seconds = response.content, self.limits.first_byte_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    part = await content.readany()
            except TimeoutError as error:
                raise BrokenStream(f"nothing came for {seconds:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise BrokenStream(f"{type(error).__name__}: {error}") from error
            if not part:
                return
            seconds = self.limits.stall_seconds
            yield part


def key_of(replica: Replica) -> dict[str, str]:
    """The header with the key for a backend."""
    name = replica.settings.key_env
    return {} if name is None else {"Authorization": f"Bearer {os.environ[name]}"}


async def prepared(upstream: Upstream, replica: Replica, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body once what its kind of backend does beforehand is done (`split` lets another server prefill)."""
    before = BACKENDS[replica.settings.kind].before
    return body if before is None else await before(upstream, replica, path, body)


def outgoing(asked: Asked, replica: Replica, body: dict[str, Any], *, ids: bool, plain: bool) -> dict[str, Any]:
    """A request's body as one backend gets it. ids: token ids are wanted. plain: without drafts."""
    made = {**body, "model": replica.model or asked.model}
    if asked.stream:
        made["stream"] = True
        made["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if ids and replica.vllm:
            made["return_token_ids"] = True
    if replica.settings.priorities:
        made["priority"] = asked.priority if asked.priority is not None else BATCH_PRIORITY * (asked.kind == "batch")
    if plain and replica.load.drafts:
        made["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), "selfspec_k": 0}
    return made
