"""An engine that computes nothing: it takes one step at a time, and the time of a step is a curve over its requests.

The simulation of the tests (`tests/gateway/simulated.py`) runs it in simulated time. For `rising_load.py --simulated` it is
an HTTP server that sleeps until its step ends, so several of them share a machine and slow nobody down:

    python experiments/gateway/step_engine.py early --port 8001 --slower 2
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from scipy.optimize import brentq

ROOT = Path(__file__).parents[2]
MODEL = "toy"
CHUNK = 2048  # prompt tokens of one step

# ---- the engine ------------------------------------------------------------------------------------------------------


def on_curve(points: Sequence[tuple[float, float]], running: float) -> float:
    """The value at `running` requests of a curve through (requests, value): straight lines in logarithms."""
    place = min(max(1, sum(running >= level for level, _ in points)), len(points) - 1)
    (low, less), (high, more) = points[place - 1 : place + 1]
    return less * (more / less) ** (math.log(max(running, points[0][0]) / low) / math.log(high / low))


@dataclass(eq=False)
class Job:
    """A request. prefill: tokens of its prompt that are still to be read. left: tokens of its answer still to come."""

    prefill: float
    left: int
    of: Any = None


@dataclass
class Engine:
    """One step at a time: the next prompts are read, and every other request gets the tokens of one round.

    seconds: of a step with so many requests. rate: prompt tokens read a second, in addition. k, acceptance: of a
    round's drafts each one is accepted with this probability, until one is not. cost: of a draft step, in plain steps.
    slots: requests at once; more of them wait.
    """

    seconds: Callable[[int], float]
    rate: float = 5000.0
    k: int = 0
    acceptance: float = 0.0
    cost: float = 0.0
    slots: int = 1 << 20
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    jobs: list[Job] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("drafts", "accepted", "rounds", "steps"), 0))
    _step: list[tuple[Job, bool]] = field(default_factory=list)  # whether it gets no more than its first token

    @property
    def tokens(self) -> float:
        """Tokens that a round brings, on average."""
        return sum(self.acceptance**place for place in range(self.k + 1))

    @property
    def work(self) -> float:
        """What a round costs, in plain steps."""
        return 1.0 + self.cost * self.k

    def begin(self) -> float | None:
        """Seconds that the step takes which begins now; None where there is nothing to do."""
        self._step, room, read = [], float(CHUNK), 0.0
        for job in self.jobs[: self.slots]:
            part = min(job.prefill, room)
            if part or not job.prefill:
                self._step.append((job, part > 0))
            job.prefill -= part
            room, read = room - part, read + part
        return self.seconds(len(self._step)) + read / self.rate if self._step else None

    def end(self) -> list[tuple[Job, int]]:
        """The step has ended: (request, tokens that it got). Requests that have all their tokens are gone."""
        found, rounds = [], 0
        for job, first in self._step:
            if job.prefill or job not in self.jobs:
                continue
            accepted = 0
            if not first:
                accepted = next((place for place in range(self.k) if self.draw.random() >= self.acceptance), self.k)
                self.counts["accepted"] += accepted
                rounds += 1
            tokens = min(job.left, 1 + accepted)
            job.left -= tokens
            found.append((job, tokens))
        if self.k and rounds:
            self.counts["drafts"] += rounds
            self.counts["rounds"] += 1
            self.counts["steps"] += self.k
        self.jobs = [job for job in self.jobs if job.left]
        return found

    def running(self) -> int:
        """Requests that have a place."""
        return min(self.slots, len(self.jobs))

    def metrics(self, says: bool) -> str:
        """As a vLLM server's /metrics. says: what the next step is expected to take, too, as selfspec's controller."""
        lines: dict[str, float] = {
            "vllm:num_requests_running": self.running(),
            "vllm:num_requests_waiting": len(self.jobs) - self.running(),
        }
        if self.k:
            lines["vllm:spec_decode_num_drafts_total"] = self.counts["drafts"]
            lines["vllm:spec_decode_num_accepted_tokens_total"] = self.counts["accepted"]
            lines["vllm:selfspec_draft_rounds_total"] = self.counts["rounds"]
            lines["vllm:selfspec_draft_steps_total"] = self.counts["steps"]
            lines["vllm:selfspec_draft_cost"] = self.cost
        if says and self.running():
            lines["vllm:selfspec_expected_step_seconds"] = self.seconds(self.running())
        return "".join(f'{name}{{engine="0"}} {value}\n' for name, value in lines.items())


# ---- as published ----------------------------------------------------------------------------------------------------

PUBLISHED = ROOT / "results" / "published" / "gpu" / "gpu_8b.jsonl.xz"
ARMS = {"early": "layer_skip", "draft_model": "draft_model", "plain": "baseline"}
"""Kinds of servers, and the arm of the published run on an H200 whose times they have."""
EACH, SLOTS = 8, 16  # measured requests in one stream, and streams at once: 128 requests, as there
RATE = 20_000.0  # prompt tokens a second: not measured there
EXIT_SHARE = 8 / 32  # of the layers of the 8B shape, that a draft step of early exit runs
DRAFT_SHARE = 0.3  # of a plain step, for a step of the draft model: only its product with the step's time is used


def published(kind: str) -> tuple[list[tuple[float, float]], int, float]:
    """(seconds of a step by requests, drafts of a round, tokens of a round) of a kind in `PUBLISHED`, short prompts."""
    points, k, tokens = [], 0, 1.0
    for line in lzma.decompress(PUBLISHED.read_bytes()).splitlines():
        row = json.loads(line)["data"]
        arm = row.get("arm") or {}
        if arm.get("arm") == ARMS[kind] and arm.get("workload") == "decode" and not arm.get("runner"):
            k, tokens = arm.get("k") or 0, row["figures"].get("mean_accepted_len") or 1.0
            points.append((float(arm["batch"]), row["figures"]["tpot_ms"] * tokens / 1000))
    return sorted(points), k, tokens


def as_published(kind: str, slower: float = 1.0, seed: int = 0) -> Engine:
    """An engine with the step times of a kind of server on an H200. slower: that many times as long."""
    points, k, tokens = published(kind)
    acceptance = brentq(lambda share: sum(share**place for place in range(k + 1)) - tokens, 0, 1) if k else 0.0
    cost = EXIT_SHARE if kind == "early" else DRAFT_SHARE
    seconds = lambda running: slower * on_curve(points, EACH * running)  # noqa: E731
    return Engine(seconds, RATE / slower, k, acceptance, cost if k else 0.0, SLOTS, random.Random(seed))


# ---- a server --------------------------------------------------------------------------------------------------------


class SleepingServer:
    """An engine behind HTTP. It sleeps until the end of each step, which takes its time whether or not this process was
    late with the one before."""

    def __init__(self, engine: Engine, says: bool) -> None:
        self.engine, self.says = engine, says
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Take steps for ever."""
        at = time.monotonic()
        while True:
            seconds = self.engine.begin()
            if seconds is None:
                self.wake.clear()
                await self.wake.wait()
                at = time.monotonic()
                continue
            at += seconds
            await asyncio.sleep(at - time.monotonic())
            for job, tokens in self.engine.end():
                job.of.put_nowait(tokens)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A stream of max_tokens words, an event for each round."""
        body = await request.json()
        prompt, events = body["prompt"], asyncio.Queue[int]()
        size = len(prompt) if isinstance(prompt, list) else max(1, len(prompt) // 4)
        job = Job(float(size), body["max_tokens"], events)
        self.engine.jobs.append(job)
        self.wake.set()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            left = body["max_tokens"]
            while left:
                tokens = await events.get()
                left -= tokens
                ids = [1] * tokens if body.get("return_token_ids") else None
                choice = {"index": 0, "text": "word " * tokens, "token_ids": ids, "finish_reason": None}
                await response.write(self._event([choice | {"finish_reason": None if left else "length"}]))
            usage = {"prompt_tokens": size, "completion_tokens": body["max_tokens"]}
            await response.write(self._event([], usage=usage) + b"data: [DONE]\n\n")
        finally:
            if job in self.engine.jobs:
                self.engine.jobs.remove(job)
        return response

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
        return b"data: " + json.dumps(head | {"choices": choices} | more).encode() + b"\n\n"

    async def serve(self, host: str, port: int) -> None:
        """Answer until this process is ended."""

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=self.engine.metrics(self.says))

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": MODEL}]})

        app = web.Application()
        app.add_routes([web.get("/health", health), web.get("/metrics", metrics), web.get("/v1/models", models)])
        app.add_routes([web.post("/v1/completions", self.complete)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=4096).start()
        await self.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(ARMS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slower", type=float, default=1.0)
    given = parser.parse_args()
    server = SleepingServer(as_published(given.kind, given.slower), says=given.kind == "early")
    asyncio.run(server.serve(given.host, given.port))


if __name__ == "__main__":
    main()
