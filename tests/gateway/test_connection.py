"""Connections to backends: what a server may send, and what becomes of the connection."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from selfspec_cli.gateway.connection import KEPT_SECONDS, MOST_HEAD, Connections

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
WHOLE = HEAD + b"content-length: 5\r\n\r\nhello"


@asynccontextmanager
async def answering(*answers):
    """A server that sends these bytes, one after the other for each request; None closes the connection. Gives its
    address and its connections so far."""
    left, opened = list(answers), []

    async def serve(reader, writer):
        opened.append(writer)
        while (await reader.readuntil(b"\r\n\r\n")) and left:
            said = left.pop(0)
            for part in said if isinstance(said, tuple) else (said,):
                if part is None:
                    return writer.close()
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)

    async def quietly(reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()

    found = await asyncio.start_server(quietly, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{found.sockets[0].getsockname()[1]}/x", opened
    finally:
        found.close()


async def got(connections, url, seconds=2.0):
    """(status, body) of one answer."""
    found = await connections.ask("GET", url, {}, b"", seconds)
    try:
        body = b""
        while part := await found.read(seconds):
            body += part
        return found.status, body
    finally:
        connections.give_back(found)


CHUNKS = (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n")


@pytest.mark.parametrize(("answer", "kept"), [
    (WHOLE, True),
    (tuple(WHOLE[place : place + 7] for place in range(0, len(WHOLE), 7)), True),
    (CHUNKS, True),
    ((b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", WHOLE), True),
    ((HEAD + b"\r\nhello", None), False),  # without a length it ends with the connection
    (HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", False),
])  # fmt: skip
async def test_an_answer_is_read_whole_and_its_connection_kept_where_it_can_be(answer, kept):
    async with answering(answer, WHOLE) as (url, opened):
        connections = Connections(1.0)
        assert await got(connections, url) == (200, b"hello")
        assert await got(connections, url) == (200, b"hello")
        assert len(opened) == (1 if kept else 2)
        connections.close()


@pytest.mark.parametrize("answer", [
    b"this is no HTTP\r\n\r\n",
    (HEAD + b"content-length: 500\r\n\r\nhello", None),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\nzz\r\n", None),
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MOST_HEAD + 1),
    None,
])  # fmt: skip
async def test_what_is_no_whole_answer_is_an_error_and_its_connection_is_closed(answer):
    async with answering(answer, WHOLE) as (url, opened):
        connections = Connections(1.0)
        with pytest.raises(ConnectionError):
            await got(connections, url)
        assert await got(connections, url) == (200, b"hello")
        assert len(opened) == 2


async def test_a_connection_that_was_closed_while_nobody_used_it_costs_no_request():
    async with answering((WHOLE, None), WHOLE) as (url, opened):
        connections = Connections(1.0)
        await got(connections, url)
        await asyncio.sleep(0.05)
        assert await got(connections, url) == (200, b"hello")
        assert len(opened) == 2


async def test_a_kept_connection_that_is_closed_at_the_next_request_is_replaced():
    async with answering(WHOLE, None, WHOLE) as (url, opened):
        connections = Connections(1.0)
        await got(connections, url)
        assert await got(connections, url) == (200, b"hello")
        assert len(opened) == 2


async def test_a_server_that_says_nothing_is_not_waited_for_and_one_that_is_not_there_is_an_error():
    async with answering(()) as (url, _):
        with pytest.raises(TimeoutError):
            await got(Connections(1.0), url, seconds=0.05)
    with pytest.raises(ConnectionError):
        await got(Connections(1.0), url)


async def test_connections_of_a_rush_are_closed_when_nobody_needs_them():
    async with answering(*[WHOLE] * 5) as (url, opened):
        connections = Connections(2.0)
        rush = [await connections.ask("GET", url, {}, b"", 2.0) for _ in range(4)]
        for one in rush:
            assert await one.read(2.0) == b"hello"
            connections.give_back(one)
        for one in rush[:3]:
            one.idle_since -= KEPT_SECONDS
        assert await got(connections, url) == (200, b"hello")
        assert [one.transport.is_closing() for one in rush] == [True, True, True, False]
        assert len(opened) == 4
        connections.close()
