"""What happens in each of several gateways in each of fifteen faults; `overhead.py --faults` runs it.

Two backends without a model (soak.py's) are behind each gateway, and good clients check every answer. Each fault begins with
both backends well. A gateway gets SECONDS for a backend to begin to answer, where that can be set: the gateway's own
`first_byte_seconds` and `stall_seconds`, LiteLLM's `stream_timeout`; vllm-router has a limit for whole requests alone.
Good requests are counted as right (the whole text, once), failed (an error status, or an error in the stream), cut (the text ends
early, and nothing says so), wrong (another text, or something that is no answer), and late (no end after LATE seconds).
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import overhead
import soak

SECONDS, LATE, AGAIN = 5.0, 30.0, 45.0
COUNT = 12  # good requests of each fault
PATH = overhead.PATH


class Bench:
    """One gateway, its two backends, and good clients. process: id of the gateway's session."""

    def __init__(self, url: str, process: int, backends: list[soak.Backend], session: aiohttp.ClientSession) -> None:
        self.url, self.process, self.backends, self.session = url, process, backends, session
        self.turn = 0

    async def one(self, stream: bool = True) -> str:
        """What became of a good request."""
        self.turn += 1
        prompt = f"good {self.turn}"
        body = {"model": soak.MODEL, "prompt": prompt, "max_tokens": soak.TOKENS, "temperature": 0, "stream": stream}
        try:
            async with (
                asyncio.timeout(LATE),
                self.session.post(self.url + PATH, json=body, headers=overhead.HEADERS) as response,
            ):
                raw = (await response.read()).decode(errors="replace")
        except TimeoutError:
            return "late"
        except aiohttp.ClientError:
            return "failed"  # the connection breaks off
        if response.status != 200:
            return "failed"
        return judged(raw, stream, soak.expected(prompt))

    async def good(self, count: int = COUNT, stream: bool = True) -> str:
        """What became of several at once."""
        found = Counter(await asyncio.gather(*(self.one(stream) for _ in range(count))))
        return ", ".join(f"{number} {word}" for word, number in found.most_common())

    async def fault(self, name: str) -> None:
        """What the first backend does from now on."""
        await self.backends[0].do(self.session, name)

    async def bad(self, body: dict[str, Any]) -> None:
        """A request whose answer nobody looks at."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with (
                asyncio.timeout(LATE),
                self.session.post(self.url + PATH, json=body, headers=overhead.HEADERS) as response,
            ):
                await response.read()

    async def raw(self, data: bytes, seconds: float = 5.0) -> str:
        """The first line of what comes back for these bytes."""
        host, port = self.url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(seconds):
                writer.write(data)
                with suppress(ConnectionError):
                    await writer.drain()
                return (await reader.readline()).decode(errors="replace").strip() or "closed"
        except (TimeoutError, ConnectionError) as error:
            return "no answer" if isinstance(error, TimeoutError) else "closed"
        finally:
            writer.close()

    async def asked(self, *backends: soak.Backend) -> int:
        """Requests that these backends (all, where none is named) have got."""
        return await self._seen("asked", backends)

    async def running(self) -> int:
        """Requests that the backends answer now."""
        return await self._seen("running", ())

    async def _seen(self, name: str, backends: Sequence[soak.Backend]) -> int:
        total = 0
        for backend in backends or self.backends:
            async with self.session.get(f"http://127.0.0.1:{backend.port}/seen") as response:
                total += (await response.json())[name]
        return total


def judged(raw: str, stream: bool, wanted: str) -> str:
    """right, failed, cut or wrong."""
    parts = (
        [one[5:].strip() for one in raw.replace("\r", "").split("\n") if one.startswith("data:")] if stream else [raw]
    )
    text = ""
    for part in parts:
        if part == "[DONE]":
            continue
        try:
            document = json.loads(part)
            if document.get("error") or document.get("object") == "error" or "message" in document:
                return "failed"
            text += "".join(choice.get("text") or "" for choice in document["choices"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return "wrong"
    return "right" if text == wanted else "cut" if wanted.startswith(text) else "wrong"


async def poison(bench: Bench) -> str:
    body = {"model": soak.MODEL, "prompt": "poison", "max_tokens": 4}
    await asyncio.gather(*(bench.bad(body) for _ in range(30)))
    return await bench.good()


def broken(name: str, stream: bool = True) -> Callable[[Bench], Awaitable[str]]:
    """A fault of the first backend."""

    async def run(bench: Bench) -> str:
        await bench.fault(name)
        return await bench.good(stream=stream)

    return run


async def long_answer(bench: Bench) -> str:
    for backend in bench.backends:
        await backend.do(bench.session, "slow")
    before = await bench.asked()
    became = await bench.good(4, stream=False)
    return f"{became}; generated {(await bench.asked() - before) / 4:g} times"


async def slow_clients(bench: Bench) -> str:
    host, port = bench.url.split("/")[2].split(":")
    body = {"model": soak.MODEL, "prompt": "x", "max_tokens": 3000, "temperature": 0, "stream": True}
    raw = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {overhead.KEY}\r\nContent-Type: application/json\r\n"
    )
    writers = []
    for _ in range(30):
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        writers.append(writer)
    await asyncio.sleep(1.0)
    became = await bench.good()
    for writer in writers:
        writer.close()
    return became


async def huge_header(bench: Bench) -> str:
    line = await bench.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"y" * 400_000 + b"\r\n\r\n")
    return f"{line}; {await bench.good()}"


async def endless_head(bench: Bench) -> str:
    """Heads that never end, of 300 connections."""
    host, port = bench.url.split("/")[2].split(":")
    writers = []
    for _ in range(300):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nX-A: ")
        writers.append(writer)
    became = await bench.good()
    for writer in writers:
        writer.close()
    return became


async def bodies_without_key(bench: Bench) -> str:
    """Twenty bodies of 20 MiB at once, of which all but the last byte is sent, without a key."""
    before = overhead.memory_mib(bench.process)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    data = head % (PATH.encode(), 20 << 20) + b"[" * ((20 << 20) - 1)
    lines = Counter(await asyncio.gather(*(bench.raw(data, 8.0) for _ in range(20))))
    after = overhead.memory_mib(bench.process)
    return f"{lines.most_common(1)[0][0]}; {after - before:+.0f} MiB; {await bench.good()}"


async def vanished(bench: Bench) -> str:
    """A client that leaves: does its backend stop?"""
    body = {"model": soak.MODEL, "prompt": "x", "max_tokens": 400, "temperature": 0, "stream": True}
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(1.0),
            bench.session.post(bench.url + PATH, json=body, headers=overhead.HEADERS) as response,
        ):
            await response.read()
    await asyncio.sleep(2.0)
    return "the backend goes on" if await bench.running() else "the backend stops"


FAULTS: dict[str, Callable[[Bench], Awaitable[str]]] = {
    "a tenant's requests fail everywhere (500)": poison,
    "a backend answers 500": broken("refuses"),
    "a backend is killed": broken("killed"),
    "a backend hangs": broken("stopped"),
    "a backend dies in mid-stream": broken("dies"),
    "a stream goes on with comments alone": broken("pings"),
    "an error event in a stream": broken("error"),
    "garbage in a stream": broken("garbage"),
    "an answer without choices": broken("garbage", stream=False),
    "a long answer in one piece": long_answer,
    "clients that read nothing": slow_clients,
    "a client leaves": vanished,
    "a header of 400 KB": huge_header,
    "300 heads that never end": endless_head,
    "20 bodies of 20 MiB without a key": bodies_without_key,
}


@asynccontextmanager
async def _bench(program: overhead.Program, log: Path, backends: list[soak.Backend]) -> AsyncIterator[Bench]:
    """A gateway, for as long as the block lasts."""
    context = overhead.started(program, log)
    url, process = await asyncio.to_thread(context.__enter__)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Bench(url, process, backends, session)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def _all_used(bench: Bench) -> bool:
    """Whether, within AGAIN seconds, good requests are all right and both backends get some."""
    until = time.monotonic() + AGAIN
    while time.monotonic() < until:
        before = [await bench.asked(backend) for backend in bench.backends]
        fine = await bench.good(6) == "6 right"
        after = [await bench.asked(backend) for backend in bench.backends]
        if fine and all(now > then for then, now in zip(before, after, strict=True)):
            return True
        await asyncio.sleep(1.0)
    return False


async def _try_all(program: overhead.Program, log: Path, backends: list[soak.Backend]) -> dict[str, str]:
    """By fault, what became of it. A gateway that does not use a backend again after a fault is started anew."""
    found: dict[str, str] = {}
    left = list(FAULTS)
    while left:
        async with _bench(program, log, backends) as bench:
            while left:
                for backend in backends:
                    await backend.do(bench.session, "well")
                if not await _all_used(bench):
                    if not found:
                        sys.exit(f"{program.command[0]} does not use both backends")
                    found[next(reversed(found))] += f"; later the backend gets nothing for {AGAIN:g} s"
                    break
                name = left.pop(0)
                found[name] = await FAULTS[name](bench)
                print(f"  {name}: {found[name]}", file=sys.stderr)
    return found


async def _with_backends(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {name: {} for name in FAULTS}
    backends = [soak.Backend() for _ in range(2)]
    try:
        async with aiohttp.ClientSession() as session:
            for backend in backends:
                await backend.do(session, "well")
        urls = [f"http://127.0.0.1:{backend.port}" for backend in backends]
        for name, program in overhead.gateways(options, urls, folder, SECONDS).items():
            print(f"{name}:", file=sys.stderr)
            for fault, became in (await _try_all(program, folder / f"{name}.log", backends)).items():
                found[fault][name] = became
    finally:
        for backend in backends:
            await backend.kill()
    return found


def tried(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """By fault and gateway, what became of it."""
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_with_backends(options, Path(scratch)))
