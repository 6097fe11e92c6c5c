"""One backend as routes see it: its load, its failures, what is in flight there, what it will take, what it costs."""

import re
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile

from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import BackendSettings
from selfspec_cli.gateway.timing import NEW, Prediction, Timing

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:selfspec_draft_rounds_total": "draft_rounds",
    "vllm:selfspec_draft_steps_total": "draft_steps",
    "vllm:selfspec_draft_cost": "draft_cost",
    "vllm:selfspec_draft_length": "draft_length",
    "vllm:selfspec_expected_step_seconds": "step",
}
STATES = ("draft_cost", "draft_length", "step")
MOST = 1e15  # that anything may be counted
ROUNDS = 100  # of drafting, over which the tokens that a round brings are a mean
_LINE = re.compile(rf"^({'|'.join(_NAMES)})(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)

WINDOW_SECONDS = 30.0
LEAST_FAILURES = 3
SHARE = 0.5  # of the answers of the window, from which on a breaker opens
OPEN_SECONDS = 5.0
PROBES = 3  # requests at once that try a backend whose time is up

SAMPLE = 5  # events of an answer under way, of which the median time is learnt
NOISE = 1.15  # times longer that a step takes beside another backend of the host; less counts as nothing
USUAL = 1 / 8  # weight of a new request in the mean of how many are there
PREFIXES = 20_000  # blocks of prompts that are remembered to lie in a backend's prefix cache

Counts = dict[str, float]
"""Totals since the server began, and gauges as they are, by the names of _NAMES; without what it does not say."""


def read(text: str) -> Counts:
    """What a vLLM server says at /metrics: sums over its engines, of STATES the largest; only counts."""
    found: Counts = {}
    for name, value in _LINE.findall(text):
        key, number = _NAMES[name], -1.0
        with suppress(ValueError):
            number = float(value)
        if 0 <= number < MOST:
            found[key] = max(found.get(key, 0.0), number) if key in STATES else found.get(key, 0.0) + number
    return found


@dataclass(frozen=True)
class Load:
    """The state of a server: requests, and what a round of drafting costs (work, in plain steps) and brings (tokens).
    rounds: that `tokens` is a mean of. step: seconds that it expects its next step to take; None where it does not say,
    or does not draft now. known: it says anything at all. drafts: it can draft. caches: it uses its prefix cache."""

    running: float = 0.0
    waiting: float = 0.0
    work: float = 1.0
    tokens: float = 1.0
    drafts: bool = False
    caches: bool = True
    known: bool = False
    step: float | None = None
    rounds: float = 0.0


def between(before: Counts | None, now: Counts, last: Load) -> Load:
    """The load by two looks; where no round ended between them, what a round costs and brings stays as it was. Few
    rounds say little of what one brings, so they count as much as others before them."""
    work, tokens, counted = last.work, last.tokens, last.rounds
    rounds = _more(before, now, "drafts")
    if rounds:
        counted = min(ROUNDS, last.rounds + rounds)
        brought = 1.0 + (_more(before, now, "accepted") or 0.0) / rounds
        tokens += min(1.0, rounds / counted) * (brought - tokens)
        ours, steps, cost = _more(before, now, "draft_rounds"), _more(before, now, "draft_steps"), now.get("draft_cost")
        if ours and steps is not None and cost is not None:
            work = 1.0 + cost * steps / ours
    caches, step = now.get("prefix_queries") != 0, now.get("step") if now.get("draft_length") != 0 else None
    running, waiting = now.get("running", 0.0), now.get("waiting", 0.0)
    return Load(running, waiting, work, tokens, "drafts" in now, caches, "running" in now, step or None, counted)


def _more(before: Counts | None, now: Counts, name: str) -> float | None:
    """By how much a total grew; None where it is not there. A server that was started anew begins at 0."""
    later, earlier = now.get(name), (before or {}).get(name)
    return later if later is None or earlier is None or later < earlier else later - earlier


@dataclass
class Breaker:
    """When a backend that fails is left alone: by the share of failures over a window; then a few requests try it.
    outcomes: (monotonic seconds, failed) of the window. open_until: 0 while it is closed. probing: requests that
    try."""

    now: Callable[[], float] = time.monotonic
    outcomes: deque[tuple[float, bool]] = field(default_factory=deque)
    open_until: float = 0.0
    probing: int = 0

    def allows(self) -> bool:
        return not self.open_until or (self.now() >= self.open_until and self.probing < PROBES)

    def failed(self) -> None:
        at = self.now()
        self.outcomes.append((at, True))
        while self.outcomes[0][0] < at - WINDOW_SECONDS:
            self.outcomes.popleft()
        failures = sum(failed for _, failed in self.outcomes)
        often = failures >= LEAST_FAILURES and failures >= SHARE * len(self.outcomes)
        if often or (self.open_until and at >= self.open_until):
            self.open_until = at + OPEN_SECONDS

    def succeeded(self) -> None:
        """An answer began as it should; after the time of an open breaker this closes it."""
        at = self.now()
        if self.open_until and at < self.open_until:
            return
        if self.open_until:
            self.reset()
        self.outcomes.append((at, False))
        if len(self.outcomes) > 1000:
            self.outcomes.popleft()

    def reset(self) -> None:
        self.open_until = 0.0
        self.outcomes.clear()


class State(StrEnum):
    """starting: not healthy yet; warming: healthy, first requests; up: takes requests; down: was healthy, is not."""

    starting = "starting"
    warming = "warming"
    up = "up"
    down = "down"


@dataclass(eq=False)
class Flight:
    """A request at a backend. before: tokens of its answer that other backends generated. own, ahead: tokens to prefill
    of it, and before it. clock: the backend's when it began. began, first, last: seconds, when it was sent and when its
    first and its newest events came. held: seconds since then in which the client had no room. sample: of the newest
    events, seconds before them and the requests that ran."""

    replica: "Replica"
    answers: int
    before: int
    own: float
    ahead: float
    clock: float
    began: float
    first: float | None = None
    last: float = 0.0
    held: float = 0.0
    events: int = 0
    sample: list[tuple[float, float]] = field(default_factory=list)

    def came(self, events: int) -> None:
        """So many events of its stream have come."""
        at, more = self.replica.now(), events
        if self.first is None:
            self.first = self.last = at
            more -= 1
            self.replica.timing.learn_ttft(self.own, self.ahead, at - self.began)
            self.replica.breaker.succeeded()
        if more and self.answers == 1:  # parts of several answers come in no order
            self.sample.append(((at - self.last - self.held) / more, self.replica.running()))
            self.held = 0.0
            if len(self.sample) == SAMPLE:
                self.replica.learn_events(self.sample)
                self.sample = []
        self.events, self.last = self.events + events, at


@dataclass(eq=False)
class Replica:
    """A backend. breaker: whether it fails too often. backoff_until: monotonic seconds, after an answer with
    Retry-After. draining: it takes no new requests. neighbours: other backends of its host. usual: mean of the requests
    there at the newest ones of the host. per_event: tokens of an event of a stream; None before any answer was counted.
    clock: seconds of the machine that one request got that was always there: the time is shared by all that are
    there."""

    settings: BackendSettings
    weights: str = ""
    vllm: bool = False
    url: str = ""
    model: str = ""
    models: tuple[str, ...] = ()
    state: State = State.starting
    load: Load = field(default_factory=Load)
    counts: Counts | None = None  # of its newest /metrics
    timing: Timing = field(default_factory=Timing)
    now: Callable[[], float] = time.monotonic
    draining: bool = False
    backoff_until: float = 0.0
    flights: set[Flight] = field(default_factory=set)
    begun: int = 0
    in_flight_at_look: int = 0
    neighbours: Sequence["Replica"] = ()
    usual: float = 0.0
    per_event: float | None = None
    _prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _clock: float = 0.0
    _clock_at: float = 0.0

    def __post_init__(self) -> None:
        self.breaker = Breaker(self.now)

    @property
    def name(self) -> str:
        return self.settings.name

    def takes(self, model: str) -> bool:
        """Whether it serves a model by that name; `auto` is served by all."""
        return model in ("auto", *self.models, *self.settings.serves)

    def up(self) -> bool:
        """Whether it takes requests, apart from recent failures and from how many are there."""
        return self.state is State.up and not self.draining

    def backoff(self) -> float:
        """Seconds for which it asked to be left alone."""
        return max(0.0, self.backoff_until - self.now())

    def sound(self) -> bool:
        """Whether it takes requests, has not failed too often recently, and has not asked to be left alone."""
        return self.up() and self.breaker.allows() and not self.backoff()

    def has_room(self) -> bool:
        return self.settings.at_once is None or len(self.flights) < self.settings.at_once

    def priorities(self) -> bool:
        """Whether its server schedules by priority, as its words say."""
        return "--scheduling-policy priority" in " ".join(self.settings.words).replace("=", " ")

    def running(self) -> float:
        """Requests that are there: our own, and those of others when it was looked at."""
        return max(0.0, self.load.running + self.load.waiting - self.in_flight_at_look) + len(self.flights)

    def beside(self) -> bool:
        """Whether another backend of its host is busy."""
        return any(one.flights for one in self.neighbours)

    def slowed(self) -> bool:
        """Whether other backends of its host slow it down, or that was not measured yet."""
        longer = self.timing.beside
        return bool(self.neighbours) and (longer.count == 0 or longer.seconds > NOISE)

    def came_up(self) -> None:
        """It takes requests from now on. A server that was started anew has an empty prefix cache, and what drafts
        brought in the text that warmed it up says nothing of the text of clients."""
        self.state = State.up
        self.load = replace(self.load, rounds=0.0)
        self.breaker.reset()
        self._prefixes.clear()

    def look(self) -> tuple[int, int]:
        """Its /metrics is asked for: (our requests there, how many there ever were), for `looked`."""
        return len(self.flights), self.begun

    def looked(self, before: tuple[int, int], counts: Counts) -> None:
        """It has answered. Requests sent meanwhile may be in what it says: they are ours, and not others'."""
        load = self.load = between(self.counts, counts, self.load)
        self.counts, self.in_flight_at_look = counts, before[0] + self.begun - before[1]
        if load.step is not None and load.running:
            self.timing.learn_step(load.running, load.step / load.work, self.beside())

    def cached_share(self, request: Request) -> float:
        """Share of the prompt that was sent there before, from its beginning, and so lies in its prefix cache."""
        if not request.blocks or not self.load.caches:
            return 0.0
        known = takewhile(self._prefixes.__contains__, request.blocks)
        return sum(1 for _ in known) / len(request.blocks)

    def uncached(self, request: Request) -> float:
        """Tokens of the prompt that have to be prefilled there."""
        return request.prompt_tokens * (1.0 - self.cached_share(request))

    def ahead(self) -> float:
        """Tokens to prefill of requests there that have no token yet."""
        return sum(flight.own for flight in self.flights if flight.first is None)

    def predict(self, request: Request, there: float | None = None) -> Prediction | None:
        """The times of a request if it were sent there now; None where too little was measured. there: as if so many
        requests were there, and none of them before its first token."""
        first = self.timing.ttft.value((1.0, self.uncached(request), self.ahead() if there is None else 0.0))
        step = self.timing.steps.value((self.running() if there is None else there) + 1)
        if first is None or step is None:
            return None
        token = step * self.load.work / self.load.tokens
        return Prediction(first, token, first + token * max(0.0, request.expected_tokens - 1))

    def slows(self, request: Request) -> float:
        """Seconds that the request would add to all others there, which have half of it ahead of them on average."""
        alone, beside = self.timing.steps.value(self.running()), self.timing.steps.value(self.running() + 1)
        if alone is None or beside is None:
            return 0.0
        more = (beside - alone) * self.load.work / self.load.tokens
        return self.running() * more * request.expected_tokens / 2

    def price(self, request: Request, expected: Prediction | None = None) -> float:
        """What the request is expected to cost there; of an hourly price, its share of the machine's time."""
        own = self.settings
        cost = (request.prompt_tokens * own.price_in + request.expected_tokens * own.price_out) / 1e6
        if own.price_hour and expected is not None:
            cost += own.price_hour / 3600 * expected.e2e / (self.running() + 1)
        return cost

    def begin(self, request: Request, before: int = 0) -> Flight:
        """A request is sent there, of whose answer others generated `before` tokens."""
        self._advance()
        own, ahead = self.uncached(request), self.ahead()
        flight = Flight(self, request.answers, before, own, ahead, self._clock, self.now())
        self.begun += 1
        self.flights.add(flight)
        for one in (self, *self.neighbours):
            one.usual += USUAL * (one.running() - one.usual)
        self.breaker.probing += self.breaker.open_until > 0
        for block in request.blocks:
            self._prefixes[block] = None
            self._prefixes.move_to_end(block)
        while len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
        return flight

    def learn_events(self, sample: Sequence[tuple[float, float]]) -> None:
        """Learn the median time of successive events of one answer: (seconds before each, requests that ran). A step in
        which prompts are read takes longer, but how many of those there are is no property of the backend."""
        event = self.load.tokens if self.per_event is None else self.per_event
        times, running = zip(*sample, strict=True)
        self.learn_tpot(statistics.fmean(running), statistics.median(times) / event)

    def learn_tpot(self, running: float, seconds: float) -> None:
        """A token of each of so many requests took so many seconds."""
        self.timing.learn_step(running, seconds * self.load.tokens / self.load.work, self.beside())

    def end(self, flight: Flight, tokens: int | None) -> float:
        """It is there no longer. tokens: of its answer, where that is one text that came from here alone. Returns the
        seconds of the machine that it took, which is shared by the requests that are there at once."""
        self._advance()
        self.flights.remove(flight)
        self.breaker.probing = max(0, self.breaker.probing - 1)
        if tokens is not None and flight.events > 1:  # the first is no round's
            each = (tokens - 1) / (flight.events - 1)
            self.per_event = each if self.per_event is None else self.per_event + NEW * (each - self.per_event)
        return self._clock - flight.clock

    def _advance(self) -> None:
        at = self.now()
        if self.flights:
            self._clock += (at - self._clock_at) / len(self.flights)
        self._clock_at = at
