"""What the times of one backend are expected to be, learnt from those that were measured.

    TTFT = a + b * (prompt tokens not in its prefix cache) + c * (the same of requests that have no token yet)
    TPOT = step(requests that run) * work / yield

work is what a round costs in plain steps (1 for the verify pass, plus the draft steps by their cost), yield the tokens
that a round brings; both are read from the server's /metrics and are 1 where it does not draft. So a change of the
acceptance changes the prediction at once. a to c are fitted by recursive least squares with forgetting. step is a curve
through what was measured: the time between two events of answers under way, and what a server that drafts says its next
step will take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

FORGET = 0.98  # weight of all that came before, with each new time
FEW = 3  # times below which nothing is predicted
NEW = 0.1  # least weight of a new time in the mean of its point of a curve


class Line:
    """Recursive least squares of y on x, with forgetting; coefficients are never used below 0. start: variance of each
    coefficient at first, which it never exceeds later, in squared units of y over x."""

    def __init__(self, start: Sequence[float]) -> None:
        self.weights = np.zeros(len(start))
        self.seen = 0
        self._limit = np.array(start)
        self._spread = np.diag(start)

    def value(self, x: Sequence[float]) -> float | None:
        """The expected y; None before FEW were seen."""
        if self.seen < FEW:
            return None
        return float(np.maximum(0.0, self.weights) @ x)

    def learn(self, x: Sequence[float], y: float) -> None:
        moved = self._spread @ x
        gain_below = FORGET + moved @ x
        self.weights += moved / gain_below * (y - self.weights @ x)
        self._spread = (self._spread - np.outer(moved, moved) / gain_below) / FORGET
        # a direction in which nothing varies must not lose all it knew
        scale = np.sqrt(self._limit / np.maximum(self._limit, self._spread.diagonal()))
        self._spread *= np.outer(scale, scale)
        self.seen += 1


@dataclass
class Point:
    """Means of what was measured near one number of requests. count: of the measurements."""

    running: float = 0.0
    seconds: float = 0.0
    count: int = 0

    def learn(self, running: float, seconds: float) -> None:
        """One more; it weighs as much as any other at first, and at least NEW later."""
        self.count += 1
        weight = max(1 / self.count, NEW)
        self.running += weight * (running - self.running)
        self.seconds += weight * (seconds - self.seconds)


class Curve:
    """Seconds of a step by the requests that run, never less for more of them. Straight lines in logarithms, between
    points that are a factor of sqrt(2) apart; beyond the last one its line goes on."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}
        self.seen = 0
        self.most = 0.0  # requests with which a step was measured

    def learn(self, running: float, seconds: float) -> None:
        """One measured time. A point that contradicts it is out of date, and takes the new value."""
        place = round(2 * math.log2(max(running, 1.0)))
        point = self._points.setdefault(place, Point())
        point.learn(max(running, 1.0), seconds)
        for other, old in self._points.items():
            if (old.seconds - point.seconds) * (other - place) < 0:
                old.seconds = point.seconds
        self.seen += 1
        self.most = max(self.most, running)

    def value(self, running: float) -> float | None:
        """The expected seconds; None before FEW were measured."""
        if self.seen < FEW:
            return None
        points = [self._points[place] for place in sorted(self._points)]
        if len(points) == 1 or running <= points[0].running:
            return points[0].seconds
        low, high = next((pair for pair in pairwise(points) if running <= pair[1].running), points[-2:])
        share = math.log(running / low.running) / math.log(high.running / low.running)
        return low.seconds * (high.seconds / low.seconds) ** share if low.seconds > 0 else high.seconds


@dataclass(frozen=True)
class Prediction:
    """Seconds. e2e: to the last token, for the number of tokens that the answer is expected to have."""

    ttft: float
    tpot: float
    e2e: float


@dataclass
class Timing:
    """The times of one backend, in seconds, and the greatest rate of prefill, in tokens a second. ttft: to the first
    token, over (1, own tokens to prefill, those of requests before it). steps: of a plain step by the requests in it,
    while the host's other backends idle. beside: how many times longer a step takes while another one is busy."""

    ttft: Line = field(default_factory=lambda: Line((1.0, 1e-4, 1e-4)))
    steps: Curve = field(default_factory=Curve)
    prefill_rate: float | None = None
    beside: Point = field(default_factory=Point)

    def learn_ttft(self, own: float, ahead: float, seconds: float) -> None:
        """own, ahead: tokens to prefill of this request, and of others that were before it."""
        self.ttft.learn((1.0, own, ahead), seconds)
        if own >= 16 and seconds > 0:
            self.prefill_rate = max(self.prefill_rate or 0.0, (own + ahead) / seconds)

    def learn_step(self, running: float, seconds: float, beside: bool) -> None:
        """A plain step with so many requests. beside: another backend of the host was busy."""
        if beside:
            expected = self.steps.value(running)
            if expected and running <= self.steps.most:  # beyond it the curve is a guess
                self.beside.learn(running, max(1.0, seconds / expected))
            if not self.beside.count:
                return
            seconds /= self.beside.seconds
        self.steps.learn(running, seconds)
