"""The rule that chooses how much to draft: the most expected tokens a second, from measured times. No torch.

A speculation step of width w verifies w draft slots of each of n requests and then drafts for the next step. It takes
T(n, w) seconds and brings each request 1 + s_1 + ... + s_w tokens, where s_j is the probability that the first j drafts
of a request all stand. Before a step the rule takes the width, 0 included, with the greatest n (1 + sum s) / T.

Both sides are estimates: T by number of requests, context and width, s by position. Each is drawn from what is known of
it before it is compared (W. R. Thompson, "On the likelihood that one unknown probability exceeds another", Biometrika
1933), and what has not been seen for a while is known less, so widths that may have become better are tried again,
seldom. A width that is far behind is never drawn.

Inside a step the device makes another draft step while the tokens that it is expected to bring are worth its time at
the speed the engine runs at: the marginal value theorem. `Choice.step_value` is that number of tokens.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

WIDTHS = (12, 8, 6, 4, 3, 2, 0)
"""Widths that the rule chooses from."""
REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes with times of their own; a batch counts as the next of these. Decode graphs are captured for them."""
LARGEST_VERIFY = 768
"""Tokens of a verify pass beyond which drafts are not tried, and no decode graph is captured."""
SHORT_CONTEXT = 8192
"""Tokens of context of a whole batch below which attention takes no time of its own; beyond, each doubling does."""

DRAFTING_HELD, PLAIN_HELD = 4, 16
"""Steps that a choice holds for, so that choosing costs nothing and a step's time is its width's."""
TRIED_EVERY = 4
"""Of so many choices one is drawn; the others take the best by the means, which are the better guess between trials."""
SPREAD = 0.15
"""Relative standard deviation of a step's time that is only predicted, and about that of a single observation."""
MOST_SEEN = 32.0
"""Observations of a time that count, so that it follows what changes."""
TIME_HALF_LIFE, ACCEPTANCE_HALF_LIFE = 20.0, 30.0
"""Seconds after which what was seen counts half."""
MEMORY = 300.0
"""Verified drafts of a request after which what was seen before counts for 1/e."""
FIRST_RATE, FIRST_TRIALS = 0.8, 4.0
"""What a position is taken to accept before anything is known, and for how many drafts that counts."""


@dataclass(frozen=True)
class StepTimes:
    """What an engine's steps take, in seconds, or in plain steps where `measured` is false.

    verify: by width and number of requests, a forward pass that verifies that many drafts of each request. draft: by
    number of requests, one draft step. kv_token: reading the keys and values of one token of context once. attended:
    tokens of a request's context that a draft step reads at most.
    """

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, float]
    kv_token: float = 0.0
    attended: float = math.inf
    measured: bool = True

    @classmethod
    def assumed(cls, draft: float) -> StepTimes:
        """In plain steps, before anything was measured: a draft step takes `draft`, a draft slot nothing."""
        return cls({width: {1: 1.0} for width in WIDTHS}, {1: draft}, measured=False)

    def step(self, requests: int, width: int, context: float = 0.0) -> float:
        """A speculation step that takes all of its draft steps."""
        return self.verify_pass(requests, width) + self.kv_token * context + width * self.draft_step(requests, context)

    def verify_pass(self, requests: int, width: int) -> float:
        """The forward pass that verifies `width` drafts of each request, on a short context."""
        known = min((other for other in self.verify if other >= width), default=max(self.verify))
        return _at(self.verify[known], requests)

    def draft_step(self, requests: int, context: float = 0.0) -> float:
        """One draft step."""
        return _at(self.draft, requests) + self.kv_token * min(context, self.attended * requests)


def _at(known: Mapping[int, float], requests: int) -> float:
    """The value for `requests`, or for the next larger number; beyond the largest, in proportion."""
    numbers = sorted(known)
    place = bisect_left(numbers, requests)
    if place < len(numbers):
        return known[numbers[place]]
    return known[numbers[-1]] * (requests / numbers[-1])


@dataclass
class Acceptance:
    """How often the draft at each position stood, of those whose drafts before it did. stood, failed: [k]."""

    k: int
    stood: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    seen: float = 0.0  # when, in seconds

    def __post_init__(self) -> None:
        self.stood, self.failed = [0.0] * self.k, [0.0] * self.k

    def add(self, accepted: Mapping[int, int], width: int, now: float) -> None:
        """A verify pass of `width` drafts a request is over. accepted: requests by the number that stood."""
        requests = sum(accepted.values())
        self._fade(MEMORY / (MEMORY + requests) * 0.5 ** ((now - self.seen) / ACCEPTANCE_HALF_LIFE))
        self.seen, reached = now, requests
        for position in range(min(width, self.k)):
            ended = accepted.get(position, 0)
            self.failed[position] += ended
            reached -= ended
            self.stood[position] += reached

    def _fade(self, share: float) -> None:
        self.stood = [count * share for count in self.stood]
        self.failed = [count * share for count in self.failed]

    def survival(self, now: float, draw: random.Random | None = None) -> list[float]:
        """s_1 ... s_k: drawn from what is known, or its means. A position that was not reached takes after the one
        before it."""
        share, before, rates = 0.5 ** ((now - self.seen) / ACCEPTANCE_HALF_LIFE), FIRST_RATE, []
        for stood, failed in zip(self.stood, self.failed, strict=True):
            good, bad = stood * share + FIRST_TRIALS * before, failed * share + FIRST_TRIALS * (1 - before)
            before = min(good / (good + bad), 0.995)
            rates.append(before if draw is None else draw.betavariate(good, max(bad, 0.01)))
        return list(accumulate(rates, mul))


@dataclass
class Seen:
    """The time of one kind of step. mean: seconds; weight: observations that count; when: of the last, in seconds."""

    mean: float
    weight: float = 0.0
    when: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Take in an observation; one that is far off is brought nearer, for a host has hiccups."""
        self.weight = min(self._left(now), MOST_SEEN - 1)
        if self.weight >= 4:
            seconds = min(max(seconds, self.mean / 1.5), self.mean * 1.5)
        self.mean += (seconds - self.mean) / (self.weight + 1)
        self.weight, self.when = self.weight + 1, now

    def drawn(self, now: float, draw: random.Random) -> float:
        """A time as likely as what is known makes it."""
        spread = SPREAD / math.sqrt(1 + 2 * self._left(now))
        return self.mean * math.exp(spread * draw.gauss(0.0, 1.0))

    def _left(self, now: float) -> float:
        return self.weight * 0.5 ** ((now - self.when) / TIME_HALF_LIFE)


@dataclass(frozen=True)
class Choice:
    """How the next step drafts.

    width: draft slots of each request. step_value: tokens that another draft step must be expected to bring all
    requests together to be worth its time. step_cost: what a draft step takes, in plain steps. expected: tokens a
    second of the batch. seconds: that the step is expected to take.
    """

    width: int
    step_value: float
    step_cost: float
    expected: float
    seconds: float


class LengthRule:
    """Chooses widths for one engine, and learns from its steps. clock: seconds. The same seed, times and acceptance
    make the same choices."""

    def __init__(
        self,
        times: StepTimes,
        widths: Sequence[int] = WIDTHS,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self.times, self.widths, self.clock = times, tuple(widths), clock
        self.acceptance = Acceptance(max(widths))
        self.choices = 0
        self.trials = 0  # choices of another width than the means would have chosen
        self._random = random.Random(f"draft lengths {seed}")
        self._seen: dict[tuple[int, int, int], Seen] = {}
        self._held: dict[tuple[int, int], tuple[Choice, int]] = {}  # by batch size and limit, with steps that are left
        self._buckets: dict[int, int] = {}  # of contexts, by batch size

    def choose(self, requests: int, context: Callable[[], float] | float = 0.0, limit: int | None = None) -> Choice:
        """For the step of a batch that begins. context: tokens of all requests together, or a function that counts
        them, which is called where a choice is due. limit: the greatest width that is allowed now."""
        load = batch_size(requests)
        most = min(self.widths[0] if limit is None else limit, max(LARGEST_VERIFY // load - 1, 0))
        held = self._held.get((load, most))
        if held is not None and held[1]:
            self._held[load, most] = held[0], held[1] - 1
            return held[0]
        bucket = context_bucket(context() if callable(context) else context)
        choice = self._chosen(load, bucket, most)
        steps = DRAFTING_HELD if choice.width else PLAIN_HELD
        self._held[load, most] = choice, steps - 1
        self._buckets[load] = bucket
        return choice

    def stepped(self, requests: int, width: int, seconds: float) -> None:
        """A decode step without prefills took `seconds`, on a context as long as that of the last choice."""
        now, load = self.clock(), batch_size(requests)
        key = load, self._buckets.get(load, 0), width
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = Seen(seconds)
        seen.add(seconds, now)

    def accepted(self, counts: Mapping[int, int], width: int) -> None:
        """Drafts of a step were verified. counts: requests by the number of their drafts that stood."""
        self.acceptance.add(counts, width, self.clock())

    def seconds(self, requests: int, width: int, context: float = 0.0) -> float:
        """The expected time of a step."""
        return self._time(batch_size(requests), context_bucket(context), width).mean

    def _chosen(self, load: int, bucket: int, most: int) -> Choice:
        now = self.clock()
        times = {width: self._time(load, bucket, width) for width in self.widths if width <= most}
        likely = _tokens(self.acceptance.survival(now))
        means = {width: likely[width] / seen.mean for width, seen in times.items()}
        width = best = max(means, key=means.__getitem__)
        self.choices += 1
        if self.choices % TRIED_EVERY == 0:
            drawn = _tokens(self.acceptance.survival(now, self._random))
            speeds = {width: drawn[width] / seen.drawn(now, self._random) for width, seen in times.items()}
            width = max(speeds, key=speeds.__getitem__)
        self.trials += width != best
        plain = times[min(times)].mean
        step = self._draft_step(load, bucket, plain)
        return Choice(width, means[best] * load * step, step / plain, means[width] * load, times[width].mean)

    def _draft_step(self, load: int, bucket: int, plain: float) -> float:
        seconds = self.times.draft_step(load, _context(bucket))
        return seconds if self.times.measured else seconds * plain

    def _time(self, load: int, bucket: int, width: int) -> Seen:
        """What is known of a kind of step. What was never seen is predicted from the nearest kind that was: what that
        one took beyond the times at the start is taken to be the host's, which is the same."""
        seen = self._seen.get((load, bucket, width))
        if seen is not None:
            return seen
        own = self.times.step(load, width, _context(bucket))
        if not self._seen:
            return Seen(own)
        near = min(self._seen, key=lambda key: _distance(key, load, bucket, width))
        there = self.times.step(near[0], near[2], _context(near[1]))
        if not self.times.measured:
            return Seen(own * self._seen[near].mean / there)
        return Seen(own + max(self._seen[near].mean - there, 0.0))


def batch_size(requests: int) -> int:
    """The batch size that a batch counts as."""
    place = bisect_left(REQUESTS, requests)
    return REQUESTS[place] if place < len(REQUESTS) else -(-requests // 64) * 64


def context_bucket(tokens: float) -> int:
    """0 for a short context of a batch, and one more for each doubling."""
    return max(0, math.ceil(math.log2(max(tokens, 1.0) / SHORT_CONTEXT)))


def _context(bucket: int) -> float:
    """Tokens of context that stand for a bucket."""
    return 0.75 * SHORT_CONTEXT * 2**bucket


def _tokens(survival: Iterable[float]) -> list[float]:
    """Expected tokens of a request in a step of each width from 0 on."""
    return list(accumulate(survival, initial=1.0))


def _distance(key: tuple[int, int, int], load: int, bucket: int, width: int) -> tuple[bool, float, int]:
    """How far one kind of step is from another: drafting or not first, then batch and context, then width."""
    return (
        (key[2] > 0) != (width > 0),
        abs(math.log2(key[0] / load)) + abs(key[1] - bucket),
        abs(key[2] - width),
    )
