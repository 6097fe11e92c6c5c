"""A gateway for half an hour between hostile clients and backends that are killed, hang, restart and send garbage.

    python experiments/gateway/soak.py --minutes 30 --clients 256 --out soak.json

Three backends without a model and the gateway are processes of their own; at each moment at least one backend is well. Good
clients check every answer, whole and streamed, against the text that it has to be; one in eight of them reads slowly. Next to
them are clients that read nothing, vanish, send garbage, endless heads and long bodies, and a tenant whose every request makes
each backend fail. Reported: good requests that were right, wrong and lost, what the others did, and the gateway's memory and
open files over time. The command fails if a good request was wrong or lost, if memory grew, or if files are left open.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from selfspec_cli.engine.server import free_port

MODEL, TOKENS = "toy", 24
GAP_SECONDS = 0.04  # between two tokens
GOOD, EVIL = {"Authorization": "Bearer good"}, {"Authorization": "Bearer evil"}
FAULTS = ("well", "dies", "pings", "garbage", "error", "refuses", "killed", "stopped")
CALM_SECONDS = 70.0  # at the end, in which connections that are kept are closed
GROWTH = 1.15  # of memory, from the second third of the time to the last one, above which the run fails


def token(ids: list[int]) -> int:
    """The token after these."""
    return int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:4], "big") % 997


def expected(prompt: str) -> str:
    """What every healthy backend answers."""
    ids = [1000 + ord(letter) for letter in prompt]
    begin = len(ids)
    for _ in range(TOKENS):
        ids.append(token(ids))
    return "".join(f"w{number} " for number in ids[begin:])


# ---- a backend -------------------------------------------------------------------------------------------------------


class Answers:
    """What a server sends, as vLLM does. fault: what it does to requests now, in the middle of a stream."""

    fault = "well"

    def application(self) -> web.Application:
        """Of aiohttp; `POST /fault/NAME` sets the fault."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", lambda request: self._json({"data": [{"id": MODEL}]}))
        app.router.add_get("/{page:health|metrics}", lambda request: self._json({}))
        app.router.add_post("/fault/{name}", self._set)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def _set(self, request: web.Request) -> web.Response:
        self.fault = request.match_info["name"]
        return await self._json({})

    async def _json(self, found: dict[str, Any], status: int = 200) -> web.Response:
        return web.json_response(found, status=status)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer, or fail as `fault` says."""
        body, fault = json.loads(await request.read()), self.fault
        prompt = body["prompt"]
        ids = list(prompt) if isinstance(prompt, list) else [1000 + ord(letter) for letter in prompt]
        poisoned = isinstance(prompt, str) and prompt.startswith("poison")
        if poisoned or fault == "refuses":
            return await self._json({"error": {"message": "engine failed"}}, 500)
        count, begin = body.get("max_tokens") or 16, len(ids)
        at = random.randrange(1, TOKENS)
        if not body.get("stream"):
            await asyncio.sleep(GAP_SECONDS)
            if fault in ("dies", "pings"):
                request.transport.abort()  # type: ignore[union-attr]
            for _ in range(count):
                ids.append(token(ids))
            text = "".join(f"w{one} " for one in ids[begin:])
            choices = [{"index": 0, "text": text, "finish_reason": "length"}]
            return await self._json({"choices": None if fault in ("garbage", "error") else choices})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        port = request.transport.get_extra_info("sockname")[1]  # type: ignore[union-attr]
        for place in range(count):
            if place == at and fault != "well":
                return await self._break(request, response, fault)
            ids.append(token(ids))
            choice = {
                "index": 0,
                "text": f"w{ids[-1]} ",
                "token_ids": ids[-1:],
                "prompt_token_ids": None if place else ids[:begin],
                "finish_reason": "length" if place + 1 == count else None,
            }
            event = {"id": f"port-{port}", "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(GAP_SECONDS)
        usage = {"prompt_tokens": begin, "completion_tokens": count}
        await response.write(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> web.StreamResponse:
        if fault == "garbage":
            await response.write(b"data: <html>502</html>\n\n")
        elif fault == "error":
            await response.write(b'event: error\ndata: {"message": "no"}\n\n')
        elif fault == "pings":
            while True:
                await response.write(b": ping\n\n")
                await asyncio.sleep(0.1)
        else:
            request.transport.abort()  # type: ignore[union-attr]
        return response


class Backend:
    """The process of a server. stopped: it neither answers nor closes anything."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None
        self.stopped = False

    async def start(self) -> None:
        """Start it, where it runs no longer; let it go on, where it is stopped."""
        if self.process is None:
            self.process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", str(self.port))
        if self.stopped:
            self.process.send_signal(signal.SIGCONT)
            self.stopped = False

    async def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None

    async def do(self, session: aiohttp.ClientSession, fault: str) -> None:
        """Do this to requests from now on."""
        await self.start()
        if fault == "killed":
            await self.kill()
        elif fault == "stopped":
            assert self.process is not None
            self.process.send_signal(signal.SIGSTOP)
            self.stopped = True
        else:
            for _ in range(100):
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.post(f"http://127.0.0.1:{self.port}/fault/{fault}"):
                        return
                await asyncio.sleep(0.1)


async def chaos(
    session: aiohttp.ClientSession,
    url: str,
    backends: list[Backend],
    until: float,
    under_way: set[str],
    seen: Counter[str],
) -> None:
    """Change what all backends but one do, several times; then all are well until the gateway has seen it and no answer
    is under way that one of them broke, and another one is spared."""
    draw = random.Random(0)
    while time.monotonic() < until:
        spared = draw.choice(backends)
        for _ in range(draw.randrange(1, 5)):
            for backend in backends:
                if backend is not spared:
                    fault = draw.choice(FAULTS)
                    seen[fault] += 1
                    await backend.do(session, fault)
            await asyncio.sleep(draw.uniform(0.5, 2.0))
        for backend in backends:
            await backend.do(session, "well")
        broken = set(under_way)
        await all_up(session, url, len(backends))
        while broken & under_way:
            await asyncio.sleep(0.1)


async def all_up(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until the gateway says that all backends take requests."""
    for _ in range(300):
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/health") as response:
                if len((await response.json())["backends"]) == count:
                    return
        await asyncio.sleep(0.2)


# ---- clients ---------------------------------------------------------------------------------------------------------


async def read_all(response: aiohttp.ClientResponse, slowly: bool) -> str:
    """The body. slowly: a few bytes at a time."""
    if not slowly:
        return (await response.read()).decode()
    raw = b""
    while part := await response.content.read(256):
        raw += part
        await asyncio.sleep(GAP_SECONDS)
    return raw.decode()


async def good(
    session: aiohttp.ClientSession,
    url: str,
    until: float,
    number: int,
    pause: float,
    under_way: set[str],
    found: Counter[str],
) -> None:
    """Ask in a loop, with `pause` seconds in between on average, and check every answer."""
    draw, turn = random.Random(number), 0
    while time.monotonic() < until:
        turn += 1
        await asyncio.sleep(draw.uniform(0.0, 2 * pause))
        prompt, stream = f"client {number} turn {turn}", draw.random() < 0.8
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        under_way.add(prompt)
        try:
            async with session.post(url, json=body, headers=GOOD) as response:
                raw = await read_all(response, number % 8 == 0)
        except (aiohttp.ClientError, TimeoutError) as error:
            found[f"lost: {type(error).__name__}"] += 1
            continue
        finally:
            under_way.remove(prompt)
        streamed = stream and response.status == 200
        lines = [line[6:] for line in raw.split("\n\n") if line.startswith("data: {")] if streamed else [raw]
        answers = [json.loads(line) for line in lines]
        errors = [str(one["error"]["message"]) for one in answers if "error" in one]
        if response.status != 200 or errors:
            found[f"lost: HTTP {response.status} {errors}"[:120]] += 1
            continue
        text = "".join(choice["text"] for one in answers for choice in one["choices"])
        found["right" if text == expected(prompt) else "wrong"] += 1


async def hostile(session: aiohttp.ClientSession, url: str, until: float, number: int, found: Counter[str]) -> None:
    """Do harm, in one of several ways."""
    draw, (host, port) = random.Random(-number), url.split("/")[2].split(":")
    long = {"model": MODEL, "prompt": "long", "max_tokens": 5000, "temperature": 0, "stream": True}
    while time.monotonic() < until:
        way = draw.choice(("poison", "vanish", "unread", "garbage", "head", "body", "no key"))
        found[way] += 1
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            if way == "poison":
                body = {**long, "prompt": "poison", "stream": draw.random() < 0.5}
                async with session.post(url, json=body, headers=EVIL) as response:
                    await response.read()
            elif way == "vanish":
                async with asyncio.timeout(draw.uniform(0.01, 0.3)), session.post(url, json=long, headers=EVIL) as one:
                    await one.read()
            elif way in ("body", "no key"):
                body = {**long, "prompt": [7] * 100_000, "max_tokens": 1}
                async with session.post(url, json=body, headers=EVIL if way == "body" else {}) as response:
                    await response.read()
            else:
                raw = json.dumps(long).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer evil\r\n"
                sent = {
                    "unread": head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw,
                    "garbage": os.urandom(3000),
                    "head": head + b"X-A: " + b"y" * 300_000,
                }[way]
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                await asyncio.sleep(draw.uniform(0.1, 2.0))
                writer.close()
        await asyncio.sleep(draw.uniform(0.5, 2.0))


# ---- the run ---------------------------------------------------------------------------------------------------------


def usage(process: int) -> tuple[float, int]:
    """(MiB, open files) of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path(f"/proc/{process}/fd").iterdir()))


async def gateway(backends: list[Backend], folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A gateway in front of these backends, and its address."""
    port = free_port()
    keys = [{"name": name, "key": hashlib.sha256(name.encode()).hexdigest()} for name in ("good", "evil")]
    settings = {
        "port": port,
        "results_dir": str(folder),
        "policy": "round_robin",
        "keys": keys,
        "ledger": {"plain_share": 0.0},
        "limits": {"first_byte_seconds": 20.0, "stall_seconds": 5.0},
        "backends": [
            {"name": f"b{place}", "kind": "local", "url": f"http://127.0.0.1:{one.port}"}
            for place, one in enumerate(backends)
        ],
    }
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(settings))
    with open(folder / "gateway.log", "wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "selfspec_cli", "gateway", str(file), stdout=log, stderr=log
        )
    return process, f"http://127.0.0.1:{port}"


async def soak(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run it; the document that is printed."""
    backends = [Backend() for _ in range(3)]
    process: asyncio.subprocess.Process | None = None
    try:
        for backend in backends:
            await backend.start()
        process, url = await gateway(backends, folder)
        return await measured(given, folder, backends, process, url)
    finally:
        for backend in backends:
            await backend.kill()
        if process is not None and process.returncode is None:
            process.kill()


async def measured(
    given: argparse.Namespace, folder: Path, backends: list[Backend], process: asyncio.subprocess.Process, url: str
) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    harm: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    over_time: list[tuple[float, int]] = []
    under_way: set[str] = set()
    limits, pause = aiohttp.ClientTimeout(total=300), max(0.0, given.clients / given.rate - TOKENS * GAP_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        await all_up(session, url, len(backends))
        until, path = time.monotonic() + 60 * given.minutes, f"{url}/v1/completions"
        tasks = [chaos(session, url, backends, until, under_way, faults)]
        tasks += [good(session, path, until, number, pause, under_way, answers) for number in range(given.clients)]
        tasks += [hostile(session, path, until, number, harm) for number in range(given.clients // 4)]
        running = asyncio.gather(*tasks)
        while not running.done():
            over_time.append(usage(process.pid))
            if len(over_time) % 12 == 0:
                print(dict(answers), over_time[-1], file=sys.stderr, flush=True)
            await asyncio.wait([running], timeout=5.0)
        await running
        async with session.get(f"{url}/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if "streams_continued_total{" in line]
        continued = sum(float(line.split()[-1]) for line in lines)
    await asyncio.sleep(CALM_SECONDS)
    memory, files = usage(process.pid)
    process.send_signal(signal.SIGTERM)
    code = await process.wait()
    third = len(over_time) // 3
    words = f"--minutes {given.minutes:g} --clients {given.clients} --rate {given.rate:g}"
    return {
        "command": f"python experiments/gateway/soak.py {words}",
        "minutes": given.minutes,
        "load_average": os.getloadavg()[1],
        "good_clients": given.clients,
        "good": dict(answers),
        "hostile": dict(harm),
        "faults": dict(faults),
        "streams_continued": continued,
        "exit_code": code,
        "mib_and_files_over_time": [(round(one, 1), count) for one, count in over_time],
        "at_the_end": (round(memory, 1), files),
        "median_mib_of_thirds": [
            round(statistics.median(one for one, _ in over_time[begin : begin + third] or over_time), 1)
            for begin in (0, third, 2 * third)
        ],
        "said": (folder / "gateway.log").read_text(errors="replace").count("Traceback"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=256, help="good ones; a quarter as many hostile ones are added")
    parser.add_argument("--rate", type=float, default=20.0, help="good requests a second, all clients together")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the JSON, as well as the output")
    given = parser.parse_args()
    if given.serve:
        logging.disable()  # a client that is gone is no news here
        return web.run_app(
            Answers().application(),
            host="127.0.0.1",
            port=given.serve,
            print=None,
            backlog=1024,
            shutdown_timeout=0.1,
            handler_cancellation=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(given, Path(folder)))
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    idle_files = found["mib_and_files_over_time"][0][1] + 8
    bad = {name: count for name, count in found["good"].items() if name != "right"}
    _, second, last = found["median_mib_of_thirds"]
    files = found["at_the_end"][1]
    if bad or files > idle_files or last > GROWTH * second or found["exit_code"] or found["said"]:
        sys.exit(f"failed: {bad}, {files} files open at the end, {second} and then {last} MiB")


if __name__ == "__main__":
    main()
