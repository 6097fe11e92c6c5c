"""A gateway for some minutes between hostile clients and backends that die, hang, restart and send garbage.

    python experiments/gateway/soak.py --minutes 2 --clients 64 --out soak.json

Three backends without a model run in this process; at each moment at least one of them is well. The gateway is a process of its
own. Good clients check every answer, whole and streamed, against the text that it has to be. Beside them are clients that read
slowly or not at all, vanish, send garbage, endless heads and long bodies, and a tenant whose every request makes each backend
fail. Reported: good requests that were right, wrong and lost, what they saw of it, and the gateway's memory and open files over
time. The command fails if a good request was wrong or lost, or if files are left open at the end.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

MODEL, TOKENS = "toy", 24
GOOD, EVIL = {"Authorization": "Bearer good"}, {"Authorization": "Bearer evil"}
FAULTS = ("well", "dies", "hangs", "garbage", "error", "refuses", "gone")
CALM_SECONDS = 70.0  # at the end, in which connections that are kept are closed


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


class Backend:
    """A server that answers as vLLM does. fault: what it does to requests now, in the middle of a stream."""

    def __init__(self) -> None:
        self.fault, self.port = "well", 0
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; after the first time, where it listened before."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", lambda request: self._json({"data": [{"id": MODEL}]}))
        app.router.add_get("/{page:health|metrics}", lambda request: self._json({}))
        app.router.add_post("/v1/completions", self.complete)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, backlog=1024).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Be gone."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

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
            await asyncio.sleep(0.02)
            if fault in ("dies", "hangs"):
                request.transport.abort()  # type: ignore[union-attr]
            for _ in range(count):
                ids.append(token(ids))
            text = "<html>" if fault in ("garbage", "error") else "".join(f"w{one} " for one in ids[begin:])
            choices = [{"index": 0, "text": text, "finish_reason": "length"}]
            return await self._json({"choices": choices if text != "<html>" else None})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
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
            await response.write(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        usage = {"prompt_tokens": begin, "completion_tokens": count}
        await response.write(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> web.StreamResponse:
        if fault == "garbage":
            await response.write(b"data: <html>502</html>\n\n")
        elif fault == "error":
            await response.write(b'event: error\ndata: {"message": "no"}\n\n')
        elif fault == "hangs":
            while True:
                await response.write(b": ping\n\n")
                await asyncio.sleep(0.1)
        else:
            request.transport.abort()  # type: ignore[union-attr]
        return response


async def chaos(
    session: aiohttp.ClientSession, url: str, backends: list[Backend], until: float, seen: Counter[str]
) -> None:
    """Change what all backends but one do, several times; then all are well until the gateway has seen it, and another
    one is spared."""
    draw = random.Random(0)
    while time.monotonic() < until:
        spared = draw.choice(backends)
        for _ in range(draw.randrange(1, 5)):
            for backend in backends:
                if backend is not spared:
                    await heal(backend)
                    backend.fault = draw.choice(FAULTS)
                    seen[backend.fault] += 1
                    if backend.fault == "gone":
                        await backend.stop()
            await asyncio.sleep(draw.uniform(0.5, 2.0))
        for backend in backends:
            await heal(backend)
        await all_up(session, url, len(backends))
        await asyncio.sleep(1.0)


async def all_up(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until the gateway says that all backends take requests."""
    for _ in range(300):
        with suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as response:
                if len((await response.json())["backends"]) == count:
                    return
        await asyncio.sleep(0.2)


async def heal(backend: Backend) -> None:
    backend.fault = "well"
    if backend.runner is None:
        await backend.start()


async def good(session: aiohttp.ClientSession, url: str, until: float, number: int, found: Counter[str]) -> None:
    """Ask again and again, and check what comes."""
    draw, turn = random.Random(number), 0
    while time.monotonic() < until:
        turn += 1
        prompt, stream = f"client {number} turn {turn}", draw.random() < 0.8
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        try:
            async with session.post(url, json=body, headers=GOOD) as response:
                raw = (await response.read()).decode()
        except (aiohttp.ClientError, TimeoutError) as error:
            found[f"lost: {type(error).__name__}"] += 1
            continue
        lines = [line[6:] for line in raw.split("\n\n") if line.startswith("data: {")] if stream else [raw]
        answers = [json.loads(line) for line in lines]
        if response.status != 200 or any("error" in one for one in answers):
            message = next(str(one["error"]["message"]) for one in answers if "error" in one)
            found[f"lost: HTTP {response.status} {message[:90]}"] += 1
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
                body = {**long, "prompt": [7] * 300_000, "max_tokens": 1}
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
        await asyncio.sleep(0.05)


def usage(process: int) -> tuple[float, int]:
    """(MiB, open files) of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path(f"/proc/{process}/fd").iterdir()))


async def gateway(backends: list[Backend], folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A gateway in front of these backends, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = [{"name": name, "key": hashlib.sha256(name.encode()).hexdigest()} for name in ("good", "evil")]
    settings = {
        "port": port,
        "results_dir": str(folder),
        "policy": "round_robin",
        "keys": keys,
        "ledger": {"plain_share": 0.0},
        "limits": {"first_byte_seconds": 3.0, "stall_seconds": 1.0},
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
    for backend in backends:
        await backend.start()
    process, url = await gateway(backends, folder)
    answers: Counter[str] = Counter()
    harm: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    over_time: list[tuple[float, int]] = []
    limits = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        await all_up(session, url, len(backends))
        until, path = time.monotonic() + 60 * given.minutes, f"{url}/v1/completions"
        tasks = [chaos(session, url, backends, until, faults)]
        tasks += [good(session, path, until, number, answers) for number in range(given.clients)]
        tasks += [hostile(session, path, until, number, harm) for number in range(given.clients // 4)]
        running = asyncio.gather(*tasks)
        while not running.done():
            over_time.append(usage(process.pid))
            await asyncio.wait([running], timeout=5.0)
        await running
        async with session.get(f"{url}/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if "streams_continued_total{" in line]
        continued = sum(float(line.split()[-1]) for line in lines)
    await asyncio.sleep(CALM_SECONDS)
    memory, files = usage(process.pid)
    process.send_signal(signal.SIGTERM)
    code = await process.wait()
    for backend in backends:
        await backend.stop()
    return {
        "minutes": given.minutes,
        "good_clients": given.clients,
        "good": dict(answers),
        "hostile": dict(harm),
        "faults": dict(faults),
        "streams_continued": continued,
        "exit_code": code,
        "mib_and_files_over_time": [(round(one, 1), count) for one, count in over_time],
        "at_the_end": (round(memory, 1), files),
        "said": (folder / "gateway.log").read_text(errors="replace").count("Traceback"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=256, help="good ones; a quarter as many hostile ones are added")
    parser.add_argument("--out", type=Path, help="a file for the JSON, as well as the output")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(given, Path(folder)))
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    idle_files = found["mib_and_files_over_time"][0][1] + 8
    bad = {name: count for name, count in found["good"].items() if name != "right"}
    if bad or found["at_the_end"][1] > idle_files or found["exit_code"]:
        sys.exit(f"failed: {bad}, {found['at_the_end'][1]} files open at the end")


if __name__ == "__main__":
    main()
