"""The client's side of one request, in plain ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from selfspec_cli.gateway.errors import GatewayError, document
from selfspec_cli.gateway.events import DONE, END

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class Vanished(Exception):
    """The client closed its connection before its request was read."""


async def read_body(receive: Receive, most: int, seconds: float) -> bytes:
    """The body of a request; raises GatewayError for one of more than `most` bytes (413) or that has not come after so
    many seconds (408), and Vanished."""
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Vanished
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise GatewayError(f"the body has more than {most / 2**20:.3g} MiB", 413, "invalid_request_error")
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise GatewayError(f"the body had not come after {seconds:g} s", 408, "invalid_request_error",
                           headers={"connection": "close"}) from error  # fmt: skip
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Client:
    """Sends the answer. waits_since: monotonic seconds, while the client has no room for a part of it.
    kept: what was sent, where it is to be kept and is not too long; else None."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self.headers = headers
        self.begun = False
        self.ended = False
        self.waits_since: float | None = None
        self.kept: list[bytes] | None = None
        self._room = 0

    def keep(self, most: int) -> None:
        """Keep what is sent from now on, up to so many bytes."""
        self.kept, self._room = [], most

    async def begin(self, status: int, kind: bytes) -> None:
        """Send the head."""
        self.begun = True
        pairs = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in self.headers.items()]
        await self._out({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *pairs]})

    async def part(self, data: bytes) -> None:
        """Send a part of a stream; returns when the client has room for more."""
        await self._part(data)
        await self._out({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        """Send the last part of a stream."""
        await self._part(data)
        await self.end(data)

    async def _part(self, data: bytes) -> None:
        if not self.begun:
            self.headers["cache-control"] = "no-cache"
            await self.begin(200, EVENTS)
        if self.kept is not None:
            self._room -= len(data)
            if self._room < 0:
                self.kept = None
            else:
                self.kept.append(data)

    async def end(self, data: bytes = b"") -> None:
        """Send the end, and what comes with it."""
        self.ended = True
        await self._out({"type": "http.response.body", "body": data, "more_body": False})

    async def _out(self, message: MutableMapping[str, Any]) -> None:
        self.waits_since = time.monotonic()
        await self._send(message)
        self.waits_since = None

    async def whole(self, status: int, data: bytes, kind: bytes = JSON) -> None:
        """Send an answer in one piece."""
        self.headers["content-length"] = str(len(data))
        await self.begin(status, kind)
        if self.kept is not None and len(data) <= self._room:
            self.kept.append(data)
        await self.end(data)

    async def fail(self, error: GatewayError) -> None:
        """Tell an error: as the answer, or inside a stream that has begun."""
        if self.ended:
            return
        if not self.begun:
            self.headers.update(error.headers)
            return await self.whole(error.status, error.body())
        event = b"data: " + document(error.message, error.kind, error.status, error.param, error.backend)
        await self.end(event + END + DONE + END)


def watch(receive: Receive, client: Client, task: asyncio.Task[Any], unread: float) -> asyncio.Task[str]:
    """Cancels a task when its client goes away before its answer was sent, or has read nothing for `unread` seconds.
    Returns why; nothing where the task was not cancelled."""

    async def wait() -> str:
        gone = ""
        while not gone:
            try:
                async with asyncio.timeout(unread / 2):
                    gone = "the client is gone" if (await receive())["type"] == "http.disconnect" else ""
            except TimeoutError:
                since = client.waits_since
                if since is not None and time.monotonic() - since > unread:
                    gone = f"the client read nothing for {unread:g} s"
        if client.ended and client.waits_since is None:  # a server tells of every end in that way
            return ""
        return gone if task.cancel(gone) else ""

    return asyncio.ensure_future(wait())
