"""The one line served over HTTP, next to plain vLLM on the same GPU, in turns: closed loops and Poisson arrivals.

    python experiments/one_line/served.py MODEL OUT.json --closed chat:1,8,32,64,128,256 coding:1,32,64 --fixed 0,4,8
    python experiments/one_line/served.py MODEL OUT.json --closed --shares '' --changes chat:1 coding:64 edits:1 chat:32

Two servers run at once, and one is idle while the other is asked. The server of the one line also runs the fixed draft
lengths: the same copies with the rule switched off, through vLLM's development endpoint. A closed loop keeps its number
of requests running. Poisson arrivals come at shares of the greatest throughput that plain vLLM reached in a closed
loop, one at a time or in bursts. Every request streams 128 tokens of an answer to one of this project's own questions.
Times are the client's: TTFT to the first part with text, TPOT over the rest of the answer. The arms take turns, in
another order in each repeat.

--changes asks for one kind of prompts with one number of clients after the other. For each it says what share of plain
vLLM's tokens a second the one line had, after how many seconds it came within 5 % of the speed that it kept, and how
long it was below 0.95 of plain vLLM's at a stretch.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from selfspec_cli.texts.questions import chosen

TOKENS, QUESTIONS, BURST = 128, 64, 32
BUCKET = 0.25  # seconds over which tokens are counted while traffic changes
LOADING = 400.0  # seconds that a server may take to start
WARM = 0.2  # share of a closed loop that is left out at its beginning
PLAIN, RULE = "plain", "one line"
SPEC = '{"method": "selfspec"}'


class Request(NamedTuple):
    """When a request was sent, when its first text came and when its last, in seconds."""

    sent: float
    first: float
    last: float


def start(model: str, port: int, more: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A server of vLLM's; more: its further options."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--served-model-name", "model", "--port", str(port), "--no-enable-prefix-caching", *more]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    return subprocess.Popen(
        words, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True, env=environment
    )


class Client:
    """Asks the servers. ports: of plain vLLM and of the one line. prompts: a kind of texts/questions.py."""

    def __init__(self, session: aiohttp.ClientSession, ports: dict[str, int]) -> None:
        self._session, self._ports, self._arm = session, ports, RULE
        self.take("chat")

    def take(self, prompts: str) -> None:
        """Ask these questions from now on."""
        self.prompts, self._questions = prompts, chosen(QUESTIONS, 0, prompts)

    async def ready(self, name: str, server: subprocess.Popen[bytes]) -> float:
        """Wait until a server answers; the seconds that took."""
        began = time.perf_counter()
        while True:
            try:
                async with self._session.get(f"http://127.0.0.1:{self._ports[name]}/health") as answer:
                    if answer.status == 200:
                        return time.perf_counter() - began
            except aiohttp.ClientError:
                pass
            if time.perf_counter() - began > LOADING or server.poll() is not None:
                raise RuntimeError(f"the server of {name!r} did not start")
            await asyncio.sleep(0.5)

    async def use(self, arm: str) -> int:
        """Have a server draft by the rule, or with a fixed length ("k=4"); its port."""
        if arm == PLAIN:
            return self._ports[PLAIN]
        if arm != self._arm:  # a change makes the rule forget what it has learnt
            fixed = arm.removeprefix("k=") if arm != RULE else None
            await self._tell("early_exit_set_gate", "auto" if fixed is None else "none", None)
            await self._tell("early_exit_set_length_table", None if fixed is None else f"1:{fixed}")
            self._arm = arm
        return self._ports[RULE]

    async def _tell(self, method: str, *args: object) -> None:
        url, body = f"http://127.0.0.1:{self._ports[RULE]}/collective_rpc", {"method": method, "args": args}
        async with self._session.post(url, json=body) as answer:
            answer.raise_for_status()

    async def steps(self) -> dict[int, float]:
        """Steps that the server of the one line has planned so far, by draft slots of a request."""
        async with self._session.get(f"http://127.0.0.1:{self._ports[RULE]}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r'^vllm:selfspec_steps_by_draft_slots_total\{.*slots="(\d+)".*\} (\S+)$', text, re.M)
        return {int(slots): float(number) for slots, number in found}

    async def ask(self, port: int, number: int, came: list[tuple[float, int]] | None = None) -> Request:
        """One question, streamed. came: gets when parts came, and how many tokens of the answer there were by then."""
        body: dict[str, Any] = {
            "model": "model",
            "messages": [{"role": "user", "content": self._questions[number % QUESTIONS]}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        if came is not None:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        sent, first, last = time.perf_counter(), 0.0, 0.0
        async with self._session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for part in answer.content.iter_any():
                if b'"content":' in part:
                    last = time.perf_counter()
                    # The first part of an answer has its role and no text.
                    first = first or (0.0 if b'"content":""' in part and part.count(b"data: ") == 1 else last)
                if came is not None and (counts := re.findall(rb'"completion_tokens":(\d+)', part)):
                    came.append((time.perf_counter(), int(counts[-1])))
        return Request(sent, first or last, last)

    async def closed(self, port: int, clients: int, seconds: float) -> tuple[float, list[Request]]:
        """A closed loop: tokens a second, those of a request spread evenly over its time, and the requests."""
        ended: list[Request] = []
        begin = time.perf_counter()
        end = begin + seconds

        async def client(number: int) -> None:
            while time.perf_counter() < end:
                ended.append(await self.ask(port, number))
                number += clients

        await asyncio.gather(*(client(number) for number in range(clients)))
        since = begin + WARM * seconds
        inside = sum(max(0.0, min(one.last, end) - max(one.sent, since)) / (one.last - one.sent) for one in ended)
        return TOKENS * inside / (end - since), ended

    async def changing(self, port: int, phases: list[tuple[str, int]], seconds: float) -> list[list[float]]:
        """Closed loops one after the other: tokens a second in each BUCKET of each phase. An answer that is not
        complete when its phase ends goes on in the next one."""
        begin, tasks = time.perf_counter(), []
        answers: list[list[tuple[float, int]]] = []

        async def client(number: int, step: int, end: float) -> None:
            while time.perf_counter() < end:
                answers.append([])
                await self.ask(port, number, answers[-1])
                number += step

        for at, (prompts, clients) in enumerate(phases):
            self.take(prompts)
            end = begin + (at + 1) * seconds
            tasks += [asyncio.create_task(client(number, clients, end)) for number in range(clients)]
            await asyncio.sleep(end - time.perf_counter())
        await asyncio.gather(*tasks)
        in_phase = round(seconds / BUCKET)
        tokens = [0.0] * (len(phases) * in_phase)
        for came in answers:
            before = 0
            for when, count in came:
                if (bucket := int((when - begin) / BUCKET)) < len(tokens):
                    tokens[bucket] += (count - before) / BUCKET
                before = count
        return [tokens[at * in_phase : (at + 1) * in_phase] for at in range(len(phases))]

    async def poisson(self, port: int, rate: float, seconds: float, burst: int = 1) -> tuple[float, list[Request]]:
        """Arrivals of `rate` requests a second, `burst` at once, at the same moments for every arm: tokens a second,
        and the requests."""
        draw, asked = random.Random(1), []
        begin, moment = time.perf_counter(), 0.0
        while moment < seconds:
            await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
            asked += [asyncio.create_task(self.ask(port, len(asked) + number)) for number in range(burst)]
            moment += draw.expovariate(rate / burst)
        ended = await asyncio.gather(*asked)
        return TOKENS * len(ended) / (max(one.last for one in ended) - begin), list(ended)


def row(runs: list[tuple[float, list[Request]]], steps: dict[int, float]) -> dict[str, Any]:
    """An arm at a level: the median speed of its repeats, and the times of all their requests in milliseconds."""
    requests = [one for _, ended in runs for one in ended]
    result: dict[str, Any] = {
        "tok_s": round(statistics.median(speed for speed, _ in runs), 1),
        "all": [round(speed, 1) for speed, _ in runs],
        "requests": len(requests),
    }
    for name, values in (
        ("ttft", sorted(one.first - one.sent for one in requests)),
        ("tpot", sorted((one.last - one.first) / (TOKENS - 1) for one in requests)),
    ):
        result[f"{name}_p50_ms"] = round(1000 * statistics.median(values), 2)
        result[f"{name}_p99_ms"] = round(1000 * values[min(len(values) - 1, int(0.99 * len(values)))], 2)
    return result | ({"steps": steps} if steps else {})


def change_row(plain: list[float], ours: list[float]) -> dict[str, Any]:
    """How the one line took a change of traffic: tokens a second in each BUCKET of the phase after it, of both."""
    usual, kept = (statistics.median(speeds[len(speeds) // 2 :]) for speeds in (plain, ours))
    second = round(1 / BUCKET)
    smooth = [statistics.mean(ours[at : at + second]) for at in range(len(ours) - second + 1)]
    late = [at for at, speed in enumerate(smooth) if speed < 0.95 * kept and at < len(smooth) // 2]
    longest = run = 0
    for speed in ours:
        run = run + 1 if speed < 0.95 * usual else 0
        longest = max(longest, run)
    return {
        "plain": round(usual, 1),
        "over_plain": round(kept / usual, 3),
        "settled_s": (late[-1] + 1) * BUCKET if late else 0.0,
        "longest_below_plain_s": longest * BUCKET,
    }


async def measure(
    args: argparse.Namespace, ports: dict[str, int], servers: dict[str, subprocess.Popen[bytes]]
) -> dict[str, Any]:
    document: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "levels": []}
    fixed = [f"k={k}" for k in args.fixed.split(",") if k]
    # vLLM closes a connection that was idle for five seconds, at times while a request is on its way.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        client = Client(session, ports)
        started = await asyncio.gather(*(client.ready(name, server) for name, server in servers.items()))
        document["started_s"] = {name: round(seconds, 1) for name, seconds in zip(servers, started, strict=True)}
        for port in ports.values():
            await client.closed(port, 8, 3)

        async def level(
            name: str, arms: list[str], run: Callable[[int], Awaitable[tuple[float, list[Request]]]]
        ) -> Any:
            runs: dict[str, list[tuple[float, list[Request]]]] = {arm: [] for arm in arms}
            planned: dict[int, float] = {}
            for repeat in range(args.repeats):
                for arm in arms[repeat % len(arms) :] + arms[: repeat % len(arms)]:
                    port = await client.use(arm)
                    before = await client.steps() if arm == RULE else {}
                    runs[arm].append(await run(port))
                    if arm == RULE:
                        planned = {
                            slots: planned.get(slots, 0) + number - before.get(slots, 0)
                            for slots, number in (await client.steps()).items()
                        }
            rows = {
                arm: row(done, {k: v for k, v in planned.items() if v} if arm == RULE else {})
                for arm, done in runs.items()
            }
            document["levels"].append({"prompts": client.prompts, "level": name, "rows": rows})
            args.out.write_text(json.dumps(document, indent=1))
            plain, ours = rows[PLAIN], rows[RULE]
            keys = ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
            ratios = {key: round(ours[key] / plain[key], 2) for key in keys}
            speeds = {arm: one["tok_s"] for arm, one in rows.items()}
            print(f"{client.prompts} {name:12s}", speeds, ratios, ours.get("steps"), flush=True)
            return rows

        best, each = 0.0, args.seconds_each
        for prompts, clients in (words.split(":") for words in args.closed):
            client.take(prompts)
            for number in map(int, clients.split(",")):
                arms = [PLAIN, RULE, *fixed]
                rows = await level(f"closed {number}", arms, lambda port, n=number: client.closed(port, n, each))
                best = max(best, rows[PLAIN]["tok_s"])
        client.take("chat")
        for kind, shares, burst in (("poisson", args.shares, 1), ("bursts", args.bursts, BURST)):
            for share in (float(share) for share in shares.split(",") if share):
                arrivals = partial(client.poisson, rate=share * best / TOKENS, seconds=each, burst=burst)
                await level(f"{kind} {share:.0%}", [PLAIN, RULE], arrivals)
        phases = [(prompts, int(clients)) for prompts, clients in (words.split(":") for words in args.changes)]
        for _ in range(args.repeats if phases else 0):
            both = [await client.changing(await client.use(arm), phases, each) for arm in (PLAIN, RULE)]
            rows = [change_row(plain, ours) for plain, ours in zip(*both, strict=True)]
            document.setdefault("changes", []).append(dict(zip(args.changes, rows, strict=True)))
            args.out.write_text(json.dumps(document, indent=1))
            print(document["changes"][-1], flush=True)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--closed", nargs="*", default=["chat:1,8,32,64,128,256"], help="prompts, and their clients")
    parser.add_argument("--fixed", default="0,4", help="fixed draft lengths as further arms of the closed loops")
    parser.add_argument("--shares", default="0.3,0.6,0.9")
    parser.add_argument("--bursts", default="", help=f"shares at which {BURST} requests arrive at once")
    parser.add_argument(
        "--changes", nargs="*", default=[], help="prompts:clients, each for the seconds of --seconds-each"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-each", type=float, default=5.0)
    parser.add_argument(
        "--serve", default="--max-model-len 4096 --max-num-seqs 256 --kv-cache-memory-bytes 17179869184"
    )
    parser.add_argument("--spec", default=SPEC, help="the one line, or one with set acceptance")
    parser.add_argument("--port", type=int, default=8101, help="of plain vLLM; the next one is the one line's")
    parser.add_argument("--keep", action="store_true", help="leave the servers running")
    args = parser.parse_args()
    ports = {PLAIN: args.port, RULE: args.port + 1}
    options = {PLAIN: args.serve.split(), RULE: [*args.serve.split(), "--speculative-config", args.spec]}
    servers = {
        name: start(args.model, port, options[name], args.out.with_suffix(f".{port}.log"))
        for name, port in ports.items()
    }
    try:
        asyncio.run(measure(args, ports, servers))
    finally:
        for server in [] if args.keep else servers.values():
            os.killpg(server.pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
