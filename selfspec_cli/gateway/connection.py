"""HTTP/1.1 to backends, over connections that are kept: httptools parses, and one object is one connection.

A general client (aiohttp) took as much of a request's time as the rest of the gateway (docs/gateway.md), so there is
none. What it would also do is not done here: redirects, cookies, proxies, compressed answers.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import httptools

KEPT_SECONDS = 60.0  # for which a connection that nobody uses is kept
MOST_UNREAD = 1 << 17  # bytes of an answer that wait to be read, above which the backend is not read from
MOST_HEAD = 1 << 17  # bytes of an answer's head
CLOSED = "the connection was closed"


class Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it. Raises ConnectionError where it breaks, and TimeoutError where
    nothing comes.

    status: of HTTP; 0 before the head has come. headers: names in small letters. ended: the whole answer has come.
    """

    def __init__(self, host: tuple[str, str, int]) -> None:
        self.host, self.transport, self.idle_since = host, None, 0.0  # type: tuple[str, str, int], Any, float
        self._loop = asyncio.get_running_loop()
        self.lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser: Any = None
        self.status, self.headers, self.ended, self.keeps = 0, {}, False, False  # type: int, dict[str, str], bool, bool
        self._parts: list[bytes] = []
        self._unread = self._head = 0
        self._paused = False

    # ---- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._parser is None:  # nobody has asked anything
            return self.close()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._break(ConnectionError(f"what came is no HTTP: {error}"))
        if self.status == 0:
            self._head += len(data)
            if self._head > MOST_HEAD:
                return self._break(ConnectionError("the head of the answer does not end"))
        if self._unread > MOST_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed. An answer of no stated length ends with it."""
        if self.status and "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            self.ended = True
        self._break(error or ConnectionError(CLOSED))

    def _break(self, error: Exception) -> None:
        self.lost = self.lost or error
        self.keeps = False
        self.transport.close()
        self._wake()

    # ---- what the parser calls ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come. One of 1xx is only a notice."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        self._parts.append(part)
        self._unread += len(part)

    def on_message_complete(self) -> None:
        """The answer has ended."""
        if self.status:
            self.ended, self.keeps = True, self._parser.should_keep_alive()
        else:
            self.headers.clear()

    # ---- what a request calls ----------------------------------------------------------------------------------------

    def send(self, request: bytes) -> None:
        """Send a request; what came before is forgotten."""
        self._reset()
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    async def head(self, seconds: float) -> int:
        """The status, when it has come."""
        await self._until(lambda: self.status, seconds)
        return self.status

    async def read(self, seconds: float) -> bytes:
        """What has come of the body; empty at its end."""
        if not self._parts and not self.ended:
            await self._until(lambda: self._parts or self.ended, seconds)
        parts, self._parts, self._unread = self._parts, [], 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _until(self, there: Any, seconds: float) -> None:
        while not there():
            if self.lost is not None:
                raise self.lost
            self._waiter = self._loop.create_future()
            alarm = self._loop.call_later(seconds, self._late)
            try:
                await self._waiter
            finally:
                alarm.cancel()
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _late(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def close(self) -> None:
        """What else comes is not wanted."""
        self.keeps = False
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """Those to all backends; who asks takes one, and gives it back."""

    def __init__(self, connect_seconds: float) -> None:
        self.connect_seconds = connect_seconds
        self._idle: dict[tuple[str, str, int], deque[Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Connection:
        """A connection on which the head of an answer has come. seconds: most time until then, from the connecting on.

        Raises:
            OSError: it broke. TimeoutError: nothing came.
        """
        where, request = _request(method, url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        sent = b"".join((request, f"{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1"), body))
        while True:
            known = self._warm(where)
            connection = known or await self._connect(where)
            try:
                connection.send(sent)
                await connection.head(seconds)
                return connection
            except BaseException as error:
                connection.close()
                if (
                    known is None
                    or connection.status
                    or not isinstance(error, OSError)
                    or isinstance(error, TimeoutError)
                ):
                    raise  # otherwise it was closed while nobody used it: the next one, or a new one

    def give_back(self, connection: Connection) -> None:
        """The answer is not read any further: the connection is kept where it can be, and closed otherwise."""
        if not (connection.ended and connection.keeps) or connection.lost is not None:
            return connection.close()
        connection._parser = None
        connection.idle_since = time.monotonic()
        kept = self._idle.setdefault(connection.host, deque())
        kept.append(connection)
        while kept[0].lost is not None or connection.idle_since - kept[0].idle_since >= KEPT_SECONDS:
            kept.popleft().close()  # after a rush the last ones are used again and again, and the first ones never

    def close(self) -> None:
        """Close those that nobody uses."""
        for kept in self._idle.values():
            for one in kept:
                one.close()
        self._idle.clear()

    def _warm(self, where: tuple[str, str, int]) -> Connection | None:
        """The one that was used last; those that were closed meanwhile are forgotten."""
        kept = self._idle.get(where, ())
        while kept:
            one = kept.pop()
            if one.lost is None and time.monotonic() - one.idle_since < KEPT_SECONDS:
                return one
            one.close()
        return None

    async def _connect(self, where: tuple[str, str, int]) -> Connection:
        scheme, host, port = where
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_seconds):
                _, made = await loop.create_connection(
                    lambda: Connection(where), host, port, ssl=self._tls if scheme == "https" else None
                )
        except TimeoutError as error:
            raise ConnectionError(f"not connected in {self.connect_seconds:g} s") from error
        return made


@lru_cache(maxsize=256)
def _request(method: str, url: str) -> tuple[tuple[str, str, int], bytes]:
    """((scheme, host, port), the first lines of a request)."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    place = parts.netloc.rpartition("@")[2]
    head = f"{method} {parts.path or '/'} HTTP/1.1\r\nhost: {place}\r\n"
    return (parts.scheme, parts.hostname or "", port), head.encode("latin-1")
