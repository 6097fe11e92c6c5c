"""Backends in simulated time, for policies: no sockets, no clock, the same numbers every time.

A backend prefills one prompt after the other, and generates for all others at once: with n of them a token takes
step + slope * n seconds, times work / tokens of its drafts. What the policy sees is a `Replica`, which learns from the
simulated times as it does from real ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec_cli.gateway.load import Load
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Chooser, Ended
from selfspec_cli.gateway.replica import Flight, Replica, State
from selfspec_cli.gateway.request import Request as Asked
from selfspec_cli.gateway.settings import BackendSettings, SloSettings

TICK = 0.05  # seconds; events of streams come at most so late
LOOK = 1.0  # seconds between two looks at a server's /metrics


@dataclass
class Job:
    """A request under way. left: tokens still to come."""

    asked: Asked
    tokens: int
    flight: Flight | None
    at: float
    prefill: float
    left: float
    first: float | None = None
    ended: float = 0.0


@dataclass
class Server:
    """One simulated backend. rate: tokens prefilled a second. extra: seconds a step besides, by the time."""

    name: str
    step: float = 0.02
    slope: float = 0.001
    rate: float = 5000.0
    work: float = 1.0
    tokens: float = 1.0
    extra: Callable[[float], float] = lambda at: 0.0
    says: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    replica: Replica = field(init=False)

    def __post_init__(self) -> None:
        self.replica = Replica(
            BackendSettings(name=self.name, **self.settings), vllm=True, models=("toy",), state=State.up
        )
        self.replica.load = Load(work=self.work, tokens=self.tokens, drafts=self.tokens > 1, known=False)

    def token_seconds(self, at: float) -> float:
        running = sum(job.prefill <= 0 for job in self.jobs)
        return (self.step + self.slope * running) * self.work / self.tokens + self.extra(at)

    def tell(self, at: float) -> None:
        """The gateway looks at its /metrics; `says`: what a server that drafts expects its next step to take."""
        step = self.token_seconds(at) * self.tokens if self.says else None
        running = float(sum(job.prefill <= 0 for job in self.jobs))
        self.replica.looked(self.replica.look(), replace(self.replica.load, running=running, known=True, step=step))

    def until_next(self, at: float) -> float:
        """Seconds to the next end of a prefill or of an answer."""
        waiting = [job for job in self.jobs if job.prefill > 0]
        soon = [waiting[0].prefill / self.rate] if waiting else []
        soon += [job.left * self.token_seconds(at) for job in self.jobs if job.prefill <= 0]
        return min(soon, default=float("inf"))

    def advance(self, at: float, seconds: float) -> None:
        waiting = [job for job in self.jobs if job.prefill > 0]
        made = seconds / self.token_seconds(at)
        for job in self.jobs:
            if job.prefill <= 0:
                job.left -= made
        if waiting:
            waiting[0].prefill -= seconds * self.rate


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
    arrivals = [(one.at, place, one) for place, one in enumerate(requests)]
    heapq.heapify(arrivals)
    done: list[tuple[Job, Server]] = []
    routes = {server.name: 0 for server in servers}
    cost, qualities = 0.0, []
    looked = 0.0
    while arrivals or any(server.jobs for server in servers):
        if clock["at"] >= looked + LOOK:
            looked = clock["at"]
            for server in servers:
                server.tell(looked)
        ahead = min([TICK, *(server.until_next(clock["at"]) for server in servers)])
        ahead = min(ahead, arrivals[0][0] - clock["at"]) if arrivals else ahead
        for server in servers:
            server.advance(clock["at"], ahead)
        clock["at"] += ahead
        for server in servers:
            for job in list(server.jobs):
                finished = _step(server, job, clock["at"])
                if finished:
                    server.jobs.remove(job)
                    done.append((job, server))
                    own = server.replica.settings
                    paid = (job.asked.prompt_tokens * own.price_in + job.tokens * own.price_out) / 1e6
                    cost += paid
                    quality = judge(server.name, job.asked.text) if judge else None
                    qualities += [] if quality is None else [quality]
                    spent = clock["at"] - job.at
                    chooser.learn(job.asked, server.replica, Ended(job.tokens, spent, paid, quality))
        while arrivals and arrivals[0][0] <= clock["at"] + 1e-12:
            request = heapq.heappop(arrivals)[2]
            asked = asked_of(request)
            replica = chooser.choose(asked, [server.replica for server in servers]).order[0]
            server = next(one for one in servers if one.replica is replica)
            routes[server.name] += 1
            flight = replica.begin(asked)
            server.jobs.append(Job(asked, request.answer, flight, clock["at"], flight.own + 1e-9, request.answer))
    assert len(done) == len(requests)
    return Result(
        [job.ended - job.at for job, _ in done],
        [job.first - job.at for job, _ in done],
        cost,
        sum(qualities) / len(qualities) if qualities else 0.0,
        routes,
    )


def _step(server: Server, job: Job, at: float) -> bool:
    """Advance a job, and inform the replica of its first token. Returns whether the job has ended."""
    if job.prefill <= 1e-6 and job.first is None:
        job.prefill, job.first = 0.0, at
        job.flight.came(1)
    if job.first is None:
        return False
    rounds = 1 + int((job.tokens - job.left + 1e-6) / server.tokens)  # each of them is one event of the stream
    if rounds > job.flight.events:
        job.flight.came(rounds - job.flight.events)
    if job.left > 1e-6:
        return False
    server.replica.end(job.flight, job.tokens)
    job.ended = at
    return True


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
