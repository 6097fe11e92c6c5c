"""The client's side of one request, in plain ASGI."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from selfspec_cli.gateway.wire import END_OF_STREAM, GatewayError, invalid, unavailable, written

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class Vanished(Exception):
    """The client closed its connection before its request was read."""


class Memory:
    """Bytes of the bodies of all requests that are in the gateway at once, and how many may be."""

    most = held = 0

    async def read(self, receive: Receive, most: int, seconds: float) -> bytes:
        """The body of a request, held until `free` is called with its length. Raises Vanished, and GatewayError for
        more than `most` bytes (413), no room for it (503), or not there after `seconds` (408)."""
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
                    self.held += len(parts[-1])
                    if size > most:
                        raise invalid(f"the body has more than {most / 2**20:.3g} MiB", 413)
                    if self.held > self.most:
                        raise unavailable("no memory for the bodies of more requests")
                    more = message.get("more_body", False)
        except BaseException as error:
            self.free(size)
            if isinstance(error, TimeoutError):
                said = f"the body had not come after {seconds:g} s"
                raise invalid(said, 408, headers={"connection": "close"}) from error
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def free(self, size: int) -> None:
        self.held -= size


class Client:
    """Sends the answer. waits_since: monotonic seconds, while the client has no room for a part of it."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self.headers = headers
        self.begun = False
        self.ended = False
        self.waits_since: float | None = None

    async def begin(self, status: int, kind: bytes) -> None:
        await self.hand_on({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})

    async def part(self, data: bytes, more: bool = True) -> None:
        """Send a part of a stream; returns when the client has room for more."""
        if not self.begun:
            self.headers["cache-control"] = "no-cache"
            await self.begin(200, EVENTS)
        await self.hand_on({"type": "http.response.body", "body": data, "more_body": more})

    async def hand_on(self, message: MutableMapping[str, Any]) -> None:
        """Send an ASGI message of an answer; its head gets the headers of this client."""
        if message["type"] == "http.response.start":
            self.begun = True
            own = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in self.headers.items()]
            message = {**message, "headers": [*message["headers"], *own]}
        elif not message.get("more_body"):
            self.ended = True
        self.waits_since = time.monotonic()
        await self._send(message)
        self.waits_since = None

    async def whole(self, status: int, data: bytes) -> None:
        self.headers["content-length"] = str(len(data))
        await self.begin(status, JSON)
        await self.part(data, more=False)

    async def fail(self, error: GatewayError, named: bool = False) -> None:
        """Tell an error: as the answer, or as one event of a stream that has begun. named: events have names there."""
        if self.ended:
            return
        if not self.begun:
            self.headers.update(error.headers)
            return await self.whole(error.status, error.body())
        last = written(error.body(), "error" if named else "") + (b"" if named else END_OF_STREAM)
        await self.part(last, more=False)


async def watch(receive: Receive, client: Client, task: asyncio.Task[Any], unread: float) -> str:
    """Cancel a task when its client is gone, or has read nothing for `unread` seconds. Returns why, or nothing."""
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
