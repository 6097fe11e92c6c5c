"""Asking a backend: one HTTP client for all, and what counts as a failure of the backend's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson

from selfspec_cli.gateway.asked import Asked
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.connection import Connection, Connections
from selfspec_cli.gateway.events import BrokenStream
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.settings import LimitSettings

FAILED = (429, 500, 502, 503, 504)
"""Of HTTP: another backend is asked."""
OWN_FAULT = (401, 403)
"""The gateway's key for that backend is wrong: no client sees the error, another backend is asked."""
ERROR_BYTES = 1 << 20
PLAIN = {"accept-encoding": "identity"}
JSON = {"content-type": "application/json"}
BATCH_PRIORITY = 10  # of vLLM: smaller goes first, and interactive requests have 0


class BackendFailed(Exception):
    """A backend gave no answer: it was not reached, took too long, or answered with an error of its own.

    counts: whether it was the backend's fault, for the circuit breaker.
    """

    def __init__(self, message: str, status: int = 502, *, counts: bool = True) -> None:
        super().__init__(message)
        self.status, self.counts = status, counts


class Refused(Exception):
    """A backend refused the request itself (HTTP 4xx): the client gets the error, and nobody else is asked."""

    def __init__(self, status: int, raw: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.raw = status, raw


class Upstream:
    """The client of all backends; `close` after the last request."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.connections = Connections(limits.connect_seconds)

    def close(self) -> None:
        """Close every connection that is kept."""
        self.connections.close()

    async def get(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a page; raises BackendFailed."""
        try:
            async with asyncio.timeout(seconds):
                found = await self.connections.ask("GET", url, {**PLAIN, **(headers or {})}, b"", seconds)
                try:
                    if found.status != 200:
                        raise BackendFailed(f"HTTP {found.status}", found.status)
                    parts = []
                    while part := await found.read(seconds):
                        parts.append(part)
                finally:
                    self.connections.give_back(found)
        except OSError as error:
            raise BackendFailed(_said(error)) from error
        return b"".join(parts)

    @asynccontextmanager
    async def post(
        self, replica: Replica, path: str, body: dict[str, Any], headers: Mapping[str, str], base: str | None = None
    ) -> AsyncIterator[Connection]:
        """An answer whose head has come and says 200. base: of another address than the backend's own.

        Raises:
            BackendFailed: no answer, or an error of the backend's. Refused: HTTP 4xx.
        """
        sent, seconds = {**PLAIN, **JSON, **key_of(replica), **headers}, self.limits.first_byte_seconds
        try:
            found = await self.connections.ask("POST", (base or replica.url) + path, sent, orjson.dumps(body), seconds)
        except TimeoutError as error:
            raise BackendFailed(f"no answer in {seconds:g} s", 504) from error
        except OSError as error:
            raise BackendFailed(_said(error)) from error
        try:
            if found.status != 200:
                await self._refuse(found)
            yield found
        finally:  # what is left of an answer is not wanted: its connection is closed, and the backend stops
            self.connections.give_back(found)

    async def _refuse(self, found: Connection) -> None:
        raw, status = b"", found.status
        with suppress(OSError):
            async with asyncio.timeout(self.limits.stall_seconds):
                while len(raw) < ERROR_BYTES and (part := await found.read(self.limits.stall_seconds)):
                    raw += part
        if 400 <= status < 500 and status not in FAILED + OWN_FAULT:
            raise Refused(status, raw)
        raise BackendFailed(f"HTTP {status} {raw[:200].decode(errors='replace')}".strip(), status,
                            counts=status != 429)  # fmt: skip

    async def parts(self, found: Connection) -> AsyncIterator[bytes]:
        """What comes of an answer, as it comes; raises BrokenStream where it breaks off or stalls."""
        seconds = self.limits.first_byte_seconds
        while True:
            try:
                part = await found.read(seconds)
            except TimeoutError as error:
                raise BrokenStream(f"nothing came for {seconds:g} s") from error
            except OSError as error:
                raise BrokenStream(_said(error)) from error
            if not part:
                return
            seconds = self.limits.stall_seconds
            yield part


def _said(error: OSError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


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
    made = {**body, "model": asked.model if asked.model in replica.models else replica.model or asked.model}
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
