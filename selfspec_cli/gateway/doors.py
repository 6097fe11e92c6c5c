"""The connections of clients: how long a head may take, how large it may be, and how many there may be."""

from __future__ import annotations

import asyncio
import re
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from selfspec_cli.gateway.request import request_id

HEAD_BYTES = 1 << 16  # of a request's line and headers together
HEAD_SECONDS = 20.0  # from the connection, or from the first byte of a later request, to the end of the head
SPARE_FILES = 256  # descriptors that are no client's and no backend's
WANTED_FILES = 65_536
_HTTP2 = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""Java's HttpClient offers HTTP/2 in this way, and sends its body all the same; as an upgrade it would not be read."""
_TOO_MANY, _TOO_LARGE = "503 Service Unavailable\r\nretry-after: 1", "431 Request Header Fields Too Large"


def most_connections() -> int:
    """Clients at once for which there are file descriptors, two for each: its own and its backend's. The limit of this
    process is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, (files - SPARE_FILES) // 2)


class Doors(HttpToolsProtocol):
    """uvicorn's protocol, with limits before a request reaches the gateway. most: connections, set by the server."""

    most = 1 << 30
    _head = 0  # bytes of the head that comes now
    _fields = 0  # of its headers
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected; one too many is refused at once."""
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
        """What came is no HTTP."""
        self._refuse("400 Bad Request")

    def _wait(self) -> None:
        self._alarm = self.loop.call_later(HEAD_SECONDS, self._close)

    def _close(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and refuse a request whose head has too many."""
        if self.cycle is None or self.cycle.response_complete:
            if self._alarm is None:
                self._wait()
            self._head += len(data)
            data = _HTTP2.sub(b"", data)
        super().data_received(data)
        if self._alarm is not None and self._head > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._fields += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is there; one that is too large is refused."""
        self._head, fields, self._fields = 0, self._fields, 0
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if fields > HEAD_BYTES:
            return self._refuse(_TOO_LARGE)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        super().connection_lost(exc)
