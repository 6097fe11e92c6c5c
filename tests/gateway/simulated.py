"""Backends in simulated time, for policies: no sockets, no clock, the same numbers every time.

What the policy sees is a `Replica`, which learns from the simulated times and from the engine's /metrics as it does
from real ones.
"""

import json
import lzma
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Chooser
from selfspec_cli.gateway.replica import Flight, Load, Replica, State, read
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import BackendSettings, SloSettings

LOOK = 1.0  # seconds between two looks at a server's /metrics
NEVER = float("inf")
CHUNK = 2048  # prompt tokens of one step


# ---- An engine that takes one step at a time; the time of a step is a curve over its requests


def on_curve(points: Sequence[tuple[float, float]], running: float) -> float:
    """The value at `running` requests of a curve through (requests, value): straight lines in logarithms."""
    place = min(max(1, sum(running >= level for level, _ in points)), len(points) - 1)
    (low, less), (high, more) = points[place - 1 : place + 1]
    return less * (more / less) ** (math.log(max(running, points[0][0]) / low) / math.log(high / low))


COUNTS = {
    "drafts": "spec_decode_num_drafts_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "rounds": "selfspec_draft_rounds_total",
    "steps": "selfspec_draft_steps_total",
}


@dataclass(eq=False)
class Job:
    """A request. prefill: tokens of its prompt that are still to be read. left: tokens of its answer still to come."""

    prefill: float
    left: int
    of: Any = None


@dataclass
class Engine:
    """One step at a time: the next prompts are read, and every other request gets the tokens of one round.

    seconds: time of a step, by the number of requests in it. rate: prompt tokens read per second, which comes on top.
    k, acceptance: drafts of a round, and the probability that the next one is accepted. cost: of a draft step, in plain
    steps. slots: requests at once; more of them wait.
    """

    seconds: Callable[[int], float]
    rate: float = 5000.0
    k: int = 0
    acceptance: float = 0.0
    cost: float = 0.0
    slots: int = 1 << 20
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    jobs: list[Job] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
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
        lines: dict[str, float] = {"num_requests_running": self.running()}
        lines["num_requests_waiting"] = len(self.jobs) - self.running()
        if self.k:
            lines |= {COUNTS[name]: count for name, count in self.counts.items()} | {"selfspec_draft_cost": self.cost}
        if says and self.running():
            lines["selfspec_expected_step_seconds"] = self.seconds(self.running())
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in lines.items())


# ---- An engine with published times


PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "gpu" / "gpu_8b.jsonl.xz"
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


def as_published(kind: str, slower: float) -> Engine:
    """An engine with the step times of a kind of server on an H200. slower: that many times as long."""
    points, k, tokens = published(kind)
    acceptance = brentq(lambda share: sum(share**place for place in range(k + 1)) - tokens, 0, 1) if k else 0.0
    cost = EXIT_SHARE if kind == "early" else DRAFT_SHARE
    seconds = lambda running: slower * on_curve(points, EACH * running)  # noqa: E731
    return Engine(seconds, RATE / slower, k, acceptance, cost if k else 0.0, SLOTS)


# ---- Backends, requests, and a policy that routes them


@dataclass
class Server:
    """One simulated backend: with n requests a plain step takes step + slope * n seconds, and extra by the time, or
    what is on the curve of `points` (requests, seconds of a token). rate: tokens prefilled a second. says: whether it
    tells what its next step will take. drafts: k and acceptance. work: what a round costs, in plain steps. engine: in
    place of all these."""

    name: str
    step: float = 0.02
    slope: float = 0.001
    rate: float = 5000.0
    work: float = 1.0
    drafts: tuple[int, float] = (0, 0.0)
    points: tuple[tuple[float, float], ...] = ()
    extra: Callable[[float], float] = lambda at: 0.0
    says: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    engine: Any = None
    replica: Replica = field(init=False)
    due: float = NEVER

    def __post_init__(self) -> None:
        k, acceptance = self.drafts
        if self.engine is None:
            cost = (self.work - 1) / k if k else 0.0
            self.engine = Engine(self.seconds, self.rate, k, acceptance, cost)
        own = BackendSettings(name=self.name, **self.settings)
        self.replica = Replica(own, vllm=True, models=("toy",), state=State.up, now=lambda: 0.0)
        self.replica.load = Load(work=self.engine.work, tokens=self.engine.tokens, drafts=self.engine.k > 0)
        self.replica.counts = read(self.engine.metrics(self.says))

    def seconds(self, running: int) -> float:
        """Of a round."""
        if self.points:
            return on_curve(self.points, running) * self.engine.tokens
        return (self.step + self.slope * running) * self.work + self.extra(self.replica.now())

    def tell(self) -> None:
        """The gateway looks at its /metrics."""
        self.replica.looked(self.replica.look(), read(self.engine.metrics(self.says)))

    def begin(self, at: float) -> None:
        """Begin the next step, if there is anything to do."""
        seconds = self.engine.begin()
        self.due = NEVER if seconds is None else at + seconds

    def end(self, at: float) -> list[tuple[Request, Flight]]:
        """End the step of now and begin the next one; returns the requests that have ended."""
        ended = []
        for job, _ in self.engine.end():
            asked, flight = job.of
            flight.came(1)
            if not job.left:
                self.replica.end(flight, int(asked.expected_tokens))
                ended.append(job.of)
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


def poisson(
    rate: float, count: int, seed: int, make: Callable[[random.Random, int], tuple[str, int, int]]
) -> list[tuple[float, Request]]:
    """Requests that arrive at random, with their seconds; make: what `asked_of` takes."""
    draw, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.expovariate(rate)
        found.append((at, asked_of(*make(draw, number))))
    return found


def chooser_of(policy: str, slo: SloSettings | None = None, **options: Any) -> Chooser:
    """The chooser of a policy."""
    found = POLICIES[policy]
    return found.make(found.settings({policy: options}), slo or SloSettings())


def simulate(
    policy: str,
    servers: Sequence[Server],
    requests: Sequence[tuple[float, Request]],
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
    while coming or any(server.engine.jobs for server in servers):
        clock["at"] = at = min(look, coming[0][0] if coming else NEVER, *(server.due for server in servers))
        if at == look:
            look += LOOK
            for server in servers:
                server.tell()
        for server in servers:
            for asked, flight in server.end(at) if server.due <= at else ():
                quality = judge(server.name, asked.text) if judge else 0.0
                if judge:
                    chooser.learn(asked, server.replica, quality)
                done.append((flight, server.replica.price(asked), quality))
        while coming and coming[0][0] <= at:
            _, asked = coming.popleft()
            replica = chooser.choose(asked, [server.replica for server in servers]).order[0]
            server = next(one for one in servers if one.replica is replica)
            flight = replica.begin(asked)
            server.engine.jobs.append(Job(flight.own + 1e-9, int(asked.expected_tokens), (asked, flight)))
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


def begun(replica: Replica, asked: Request, seconds: float) -> Flight:
    """A request that is there since so many seconds, and whose first token has just come."""
    flight = replica.begin(asked)
    flight.began -= seconds
    flight.came(1)
    return flight


def asked_of(prompt: str, tokens: int, answer: int) -> Request:
    """A request. tokens: of its prompt, whose beginning decides what a prefix cache knows. answer: tokens of that."""
    blocks = tuple(hash(prompt[: place + 8]) for place in range(0, len(prompt), 8))
    body = {"model": "toy", "prompt": prompt, "max_tokens": answer}
    more = {"text": prompt, "prompt_tokens": float(tokens), "expected_tokens": float(answer), "blocks": blocks}
    return Request("/v1/completions", body, **more)
