"""The one line served over HTTP, next to plain vLLM on the same GPU, in turns: closed loops and Poisson arrivals.

    python experiments/one_line/served.py MODEL OUT.json --clients 1,8,32,64,128 --seconds-each 8

Both servers run at once; while one is asked, the other is idle. A closed loop keeps its number of requests running.
Poisson arrivals come at shares of the greatest throughput that plain vLLM reached in a closed loop. Every request
streams 128 tokens of an answer to one of this project's own chat questions. Times are taken by the client: TTFT to the
first part with text, TPOT over the rest of the answer.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from selfspec_cli.texts.chat import chosen

TOKENS = 128
LOADING = 400.0  # seconds that a server may take to start


def start(model: str, port: int, spec: dict[str, Any] | None, log: Path) -> subprocess.Popen[bytes]:
    """A server of vLLM's; spec: its speculative_config."""
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--port",
        str(port),
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        "256",
        "--kv-cache-memory-bytes",
        str(16 << 30),
        "--no-enable-prefix-caching",
    ]
    words += ["--speculative-config", json.dumps(spec)] if spec else []
    return subprocess.Popen(words, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)


async def ready(session: aiohttp.ClientSession, port: int) -> float:
    """Wait until a server answers; the seconds that took."""
    began = time.perf_counter()
    while time.perf_counter() - began < LOADING:
        try:
            async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return time.perf_counter() - began
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the server at port {port} did not start")


async def ask(session: aiohttp.ClientSession, port: int, model: str, question: str) -> tuple[float, float]:
    """One request: TTFT and TPOT in seconds."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began, first, last = time.perf_counter(), 0.0, 0.0
    async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {") and b'"content"' in line:
                last = time.perf_counter()
                first = first or last
    return first - began, (last - first) / (TOKENS - 1)


async def closed(session: aiohttp.ClientSession, port: int, model: str, clients: int, seconds: float) -> dict[str, Any]:
    """A closed loop; throughput counts the requests that end between the first tenth and the end."""
    questions, ended, end = chosen(64, 0, "chat"), [], time.perf_counter() + seconds

    async def client(number: int) -> None:
        turn = number
        while time.perf_counter() < end:
            ttft, tpot = await ask(session, port, model, questions[turn % len(questions)])
            ended.append((time.perf_counter(), ttft, tpot))
            turn += clients

    await asyncio.gather(*(client(number) for number in range(clients)))
    begin = end - 0.9 * seconds
    inside = [one for one in ended if begin <= one[0] <= end]
    return {"tok_s": round(TOKENS * len(inside) / (0.9 * seconds), 1)} | tails(ended)


async def poisson(session: aiohttp.ClientSession, port: int, model: str, rate: float, seconds: float) -> dict[str, Any]:
    """Arrivals at `rate` requests a second; the same moments for every server."""
    questions, draw, asked = chosen(64, 0, "chat"), random.Random(1), []
    begin, moment = time.perf_counter(), 0.0
    while moment < seconds:
        await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
        asked.append(asyncio.create_task(ask(session, port, model, questions[len(asked) % len(questions)])))
        moment += draw.expovariate(rate)
    ended = [(0.0, *times) for times in await asyncio.gather(*asked)]
    return {"tok_s": round(TOKENS * len(ended) / (time.perf_counter() - begin), 1)} | tails(ended)


def tails(ended: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Medians and 99th percentiles in milliseconds."""
    found: dict[str, Any] = {"requests": len(ended)}
    for place, name in ((1, "ttft"), (2, "tpot")):
        values = sorted(1000 * one[place] for one in ended)
        found |= {
            f"{name}_p50_ms": round(statistics.median(values), 2),
            f"{name}_p99_ms": round(values[min(len(values) - 1, int(0.99 * len(values)))], 2),
        }
    return found


async def measure(args: argparse.Namespace, ports: dict[str, int]) -> dict[str, Any]:
    document: dict[str, Any] = {"levels": []}
    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        document["started_s"] = {name: round(await ready(session, port), 1) for name, port in ports.items()}
        for port in ports.values():
            await closed(session, port, args.model, 8, 3)

        async def level(name: str, run: Any) -> dict[str, dict[str, Any]]:
            rows = {arm: await run(port) for arm, port in ports.items()}
            document["levels"].append({"level": name} | rows)
            args.out.write_text(json.dumps(document, indent=1))
            plain, ours = rows["plain"], rows["selfspec"]
            shown = ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms")
            ratios = {key: round(ours[key] / plain[key], 2) for key in shown}
            print(f"{name:14s} plain {plain['tok_s']:8.0f}  one line {ours['tok_s']:8.0f}  {ratios}", flush=True)
            return rows

        best = 0.0
        each = args.seconds_each
        for clients in map(int, args.clients.split(",")):
            rows = await level(f"closed {clients}", lambda port, n=clients: closed(session, port, args.model, n, each))
            best = max(best, rows["plain"]["tok_s"])
        for share in map(float, args.shares.split(",")):
            rate = share * best / TOKENS
            await level(f"poisson {share:.0%}", lambda port, r=rate: poisson(session, port, args.model, r, each))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clients", default="1,8,32,64,128,256")
    parser.add_argument("--shares", default="0.3,0.6,0.9")
    parser.add_argument("--seconds-each", type=float, default=8.0)
    args = parser.parse_args()
    specs = {"plain": None, "selfspec": {"method": "selfspec"}}
    ports = {name: 8101 + place for place, name in enumerate(specs)}
    logs = args.out.parent
    servers = [start(args.model, ports[name], spec, logs / f"served_{name}.log") for name, spec in specs.items()]
    try:
        asyncio.run(measure(args, ports))
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
