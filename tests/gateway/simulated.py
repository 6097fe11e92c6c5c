"""Backends in simulated time, for policies: no sockets, no clock, the same numbers every time.

What the policy sees is a `Replica`, which learns from the simulated times and from the engine's /metrics as it does
from real ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import step_engine

from selfspec_cli.gateway.load import Load, between, read
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Chooser
from selfspec_cli.gateway.replica import Flight, Replica, State
from selfspec_cli.gateway.request import Request as Asked
from selfspec_cli.gateway.settings import BackendSettings, SloSettings

LOOK = 1.0  # seconds between two looks at a server's /metrics
NEVER = float("inf")


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
            self.engine = step_engine.Engine(self.seconds, self.rate, k, acceptance, cost)
        own = BackendSettings(name=self.name, **self.settings)
        self.replica = Replica(own, vllm=True, models=("toy",), state=State.up, now=lambda: 0.0)
        self.replica.load = Load(work=self.engine.work, tokens=self.engine.tokens, drafts=self.engine.k > 0)
        self.counts = read(self.engine.metrics(self.says))

    def seconds(self, running: int) -> float:
        """Of a round."""
        if self.points:
            return step_engine.on_curve(self.points, running) * self.engine.tokens
        return (self.step + self.slope * running) * self.work + self.extra(self.replica.now())

    def tell(self) -> None:
        """The gateway looks at its /metrics."""
        counts = read(self.engine.metrics(self.says))
        self.replica.looked(self.replica.look(), between(self.counts, counts, self.replica.load))
        self.counts = counts

    def begin(self, at: float) -> None:
        """Begin the next step, if there is anything to do."""
        seconds = self.engine.begin()
        self.due = NEVER if seconds is None else at + seconds

    def end(self, at: float) -> list[tuple[Asked, Flight]]:
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
    while coming or any(server.engine.jobs for server in servers):
        clock["at"] = at = min(look, coming[0].at if coming else NEVER, *(server.due for server in servers))
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
        while coming and coming[0].at <= at:
            request = coming.popleft()
            asked = asked_of(request)
            replica = chooser.choose(asked, [server.replica for server in servers]).order[0]
            server = next(one for one in servers if one.replica is replica)
            flight = replica.begin(asked)
            server.engine.jobs.append(step_engine.Job(flight.own + 1e-9, request.answer, (asked, flight)))
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
