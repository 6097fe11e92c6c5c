"""Backends in simulated time, for policies: no sockets, no clock, the same numbers every time.

What the policy sees is a `Replica`, which learns from the simulated times and from the server's /metrics as it does
from real ones.
"""

from __future__ import annotations

import json
import lzma
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Chooser
from selfspec_cli.gateway.replica import Flight, Replica, State
from selfspec_cli.gateway.request import Request as Asked
from selfspec_cli.gateway.settings import BackendSettings, SloSettings
from selfspec_cli.gateway.timing import Load, between, read

CHUNK = 2048  # prompt tokens of one step
LOOK = 1.0  # seconds between two looks at a server's /metrics
NEVER = float("inf")


def on_curve(points: Sequence[tuple[float, float]], running: float) -> float:
    """The value at `running` requests of a curve through (requests, value): straight lines in logarithms."""
    place = min(max(1, sum(running >= level for level, _ in points)), len(points) - 1)
    (low, less), (high, more) = points[place - 1 : place + 1]
    return less * (more / less) ** (math.log(max(running, points[0][0]) / low) / math.log(high / low))


@dataclass(eq=False)
class Job:
    """A request at a server. prefill: prompt tokens still to be read. left: tokens of its answer still to come."""

    prefill: float
    left: int
    asked: Asked
    flight: Flight


@dataclass
class Server:
    """One simulated backend, which takes one step at a time: the next prompts are read, and every other request gets
    the tokens of one round.

    step, slope, extra: with n requests a plain step takes step + slope * n seconds, and extra by the time; or what is
    on the curve of `points` (requests, seconds of a token). rate: prompt tokens read per second, which comes on top.
    drafts: k, and the probability that the next draft is accepted. work: what a round costs, in plain steps. says:
    whether it tells what its next step will take. slots: requests at once; more of them wait.
    """

    name: str
    step: float = 0.02
    slope: float = 0.001
    rate: float = 5000.0
    work: float = 1.0
    drafts: tuple[int, float] = (0, 0.0)
    points: Sequence[tuple[float, float]] = ()
    extra: Callable[[float], float] = lambda at: 0.0
    says: bool = False
    slots: int = 1 << 20
    settings: dict[str, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    due: float = NEVER

    def __post_init__(self) -> None:
        self.k, self.acceptance = self.drafts
        self.tokens = sum(self.acceptance**place for place in range(self.k + 1))  # of a round, on average
        self.draw, self.counts = random.Random(0), Counter()
        own = BackendSettings(name=self.name, **self.settings)
        self.replica = Replica(own, vllm=True, models=("toy",), state=State.up, now=lambda: 0.0)
        self.replica.load = Load(work=self.work, tokens=self.tokens, drafts=self.k > 0)
        self.seen = read(self.metrics())
        self._step: list[tuple[Job, bool]] = []  # whether it gets no more than its first token

    def seconds(self, running: int) -> float:
        """Of a round."""
        if self.points:
            return on_curve(self.points, running) * self.tokens
        return (self.step + self.slope * running) * self.work + self.extra(self.replica.now())

    def metrics(self) -> str:
        """As a vLLM server's /metrics."""
        running = min(self.slots, len(self.jobs))
        lines = {"num_requests_running": running, "num_requests_waiting": len(self.jobs) - running}
        if self.k:
            lines |= {f"spec_decode_num_{name}_total": self.counts[name] for name in ("drafts", "accepted_tokens")}
            lines |= {f"selfspec_draft_{name}_total": self.counts[name] for name in ("rounds", "steps")}
            lines["selfspec_draft_cost"] = (self.work - 1) / self.k
        if self.says and running:
            lines["selfspec_expected_step_seconds"] = self.seconds(running)
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in lines.items())

    def tell(self) -> None:
        """The gateway looks at its /metrics."""
        counts = read(self.metrics())
        self.replica.looked(self.replica.look(), between(self.seen, counts, self.replica.load))
        self.seen = counts

    def begin(self, at: float) -> None:
        """Begin the next step, if there is anything to do."""
        self._step, room = [], float(CHUNK)
        for job in self.jobs[: self.slots]:
            part = min(job.prefill, room)
            if part or not job.prefill:
                self._step.append((job, part > 0))
            job.prefill, room = job.prefill - part, room - part
        seconds = self.seconds(len(self._step)) + (CHUNK - room) / self.rate
        self.due = at + seconds if self._step else NEVER

    def end(self, at: float) -> list[Job]:
        """End the step of now and begin the next one; returns the requests that have ended."""
        rounds = 0
        for job, first in self._step:
            if job.prefill:
                continue
            accepted = 0
            if not first:
                accepted = next((place for place in range(self.k) if self.draw.random() >= self.acceptance), self.k)
                rounds += 1
            self.counts["accepted_tokens"] += accepted
            job.left = max(0, job.left - 1 - accepted)
            job.flight.came(1)
            if not job.left:
                self.replica.end(job.flight, int(job.asked.expected_tokens))
        if rounds:
            self.counts.update(drafts=rounds, rounds=1, steps=self.k)
        ended = [job for job in self.jobs if not job.left]
        self.jobs = [job for job in self.jobs if job.left]
        self.begin(at)
        return ended


@dataclass(frozen=True)
class Result:
    """Seconds to the last token of each request, and what all of them cost; quality where it was judged."""

    seconds: list[float]
    ttft: list[float]
    cost: float
    quality: float
    routes: dict[str, int]

    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]


@dataclass(frozen=True)
class Request:
    """At which second what is asked. prompt: its beginning decides what a prefix cache knows."""

    at: float
    prompt: str
    tokens: int
    answer: int


def poisson(
    rate: float, count: int, seed: int, make: Callable[[random.Random, int], tuple[str, int, int]]
) -> list[Request]:
    """Requests that arrive at random; make: prompt, its tokens, tokens of the answer."""
    draw, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.expovariate(rate)
        found.append(Request(at, *make(draw, number)))
    return found


def chooser_of(policy: str, slo: SloSettings | None = None, **options: Any) -> Chooser:
    """The chooser of a policy."""
    found = POLICIES[policy]
    return found.make(found.settings({policy: options}), slo or SloSettings())


def simulate(
    policy: str,
    servers: Sequence[Server],
    requests: Sequence[Request],
    slo: SloSettings | None = None,
    judge: Callable[[str, str], float] | None = None,
    **options: Any,
) -> Result:
    """Let a policy route requests. judge: (backend, prompt) -> quality of the answer, which the policy learns."""
    chooser = chooser_of(policy, slo, **options)
    clock = {"at": 0.0}
    for server in servers:
        server.replica.now = lambda: clock["at"]
    coming, done, look = deque(requests), [], LOOK
    while coming or any(server.jobs for server in servers):
        clock["at"] = at = min(look, coming[0].at if coming else NEVER, *(server.due for server in servers))
        if at == look:
            look += LOOK
            for server in servers:
                server.tell()
        for server in servers:
            for job in server.end(at) if server.due <= at else ():
                quality = judge(server.name, job.asked.text) if judge else 0.0
                if judge:
                    chooser.learn(job.asked, server.replica, quality)
                done.append((job.flight, server.replica.price(job.asked), quality))
        while coming and coming[0].at <= at:
            request = coming.popleft()
            asked = asked_of(request)
            replica = chooser.choose(asked, [server.replica for server in servers]).order[0]
            server = next(one for one in servers if one.replica is replica)
            flight = replica.begin(asked)
            server.jobs.append(Job(flight.own + 1e-9, request.answer, asked, flight))
            if server.due == NEVER:
                server.begin(at)
    flights, paid, qualities = zip(*done, strict=True)
    assert len(flights) == len(requests)
    return Result(
        [one.last - one.began for one in flights],
        [one.first - one.began for one in flights],
        sum(paid),
        sum(qualities) / len(qualities),
        {server.name: sum(one.replica is server.replica for one in flights) for server in servers},
    )


def begun(replica: Replica, asked: Asked, seconds: float) -> Flight:
    """A request that is there since so many seconds, and whose first token has just come."""
    flight = replica.begin(asked)
    flight.began -= seconds
    flight.came(1)
    return flight


def asked_of(request: Request) -> Asked:
    asked = Asked("/v1/completions", {"model": "toy", "prompt": request.prompt, "max_tokens": request.answer})
    asked.text, asked.prompt_tokens = request.prompt, float(request.tokens)
    asked.expected_tokens = float(request.answer)
    blocks, before = [], 0
    for place in range(0, len(request.prompt), 8):
        before = hash((before, request.prompt[place : place + 8]))
        blocks.append(before)
    asked.blocks = tuple(blocks)
    return asked


# ---- as published ----------------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "gpu" / "gpu_8b.jsonl.xz"
ARMS = {"early": "layer_skip", "draft_model": "draft_model", "plain": "baseline"}
"""Kinds of servers, and the arm of the published run on an H200 whose times they have."""
EACH, SLOTS = 8, 16  # measured requests in one stream, and streams at once: 128 requests, as there
RATE = 20_000.0  # prompt tokens a second: not measured there
COSTS = {"early": 8 / 32, "draft_model": 0.3, "plain": 0.0}
"""Of a draft step, in plain steps: the share of the layers of the 8B shape that early exit runs; for the draft model
its product with the step's time alone is used."""


def as_published(kind: str, slower: float) -> Server:
    """A server with the step times of a kind of server on an H200, short prompts. slower: that many times as long."""
    points, k, tokens = [], 0, 1.0
    for line in lzma.decompress(PUBLISHED.read_bytes()).splitlines():
        row = json.loads(line)["data"]
        arm = row.get("arm") or {}
        if arm.get("arm") == ARMS[kind] and arm.get("workload") == "decode" and not arm.get("runner"):
            k, tokens = arm.get("k") or 0, row["figures"].get("mean_accepted_len") or 1.0
            points.append((arm["batch"] / EACH, slower * row["figures"]["tpot_ms"] * tokens / 1000))
    acceptance = brentq(lambda share: sum(share**place for place in range(k + 1)) - tokens, 0, 1) if k else 0.0
    made = sum(acceptance**place for place in range(k + 1))
    return Server(
        kind,
        points=[(level, seconds / made) for level, seconds in sorted(points)],
        rate=RATE / slower,
        work=1.0 + COSTS[kind] * k,
        drafts=(k, acceptance),
        says=kind == "early",
        slots=SLOTS,
    )
