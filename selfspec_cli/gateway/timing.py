"""What the times of one backend are expected to be, learnt from those that were measured.

    TTFT = a + b * (prompt tokens not in its prefix cache) + c * (the same of requests that have no token yet)
    TPOT = (d + e * requests running when it began) * work / yield

work is what a round costs in plain steps (1 for the verify pass, plus the draft steps by their cost), yield the tokens
that a round brings; both are read from the server's /metrics and are 1 where it does not draft. So a change of the
acceptance changes the prediction at once, while a to e are fitted by recursive least squares with forgetting. That
others end and come while a request runs is learnt with them: what is known when it is sent is how many are there.

An answer teaches when it has ended, and many may be sent before that. So the events of answers under way are counted,
and what they take is compared with what so many took before (`Late`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.98  # weight of all that came before, with each new time
FEW = 3  # times below which nothing is predicted
ENOUGH = 8  # events under way below which they say nothing
MOST_LATE = 4.0


class Line:
    """Recursive least squares of y on x, with forgetting; coefficients are never used below 0.

    size: of x. start: variance of the coefficients before anything was seen; scaled to the unit of y over that of x.
    """

    def __init__(self, start: Sequence[float]) -> None:
        self.weights = [0.0] * len(start)
        self.seen = 0
        self._limit = list(start)
        self._spread = [[start[i] if i == j else 0.0 for j in range(len(start))] for i in range(len(start))]

    def value(self, x: Sequence[float]) -> float | None:
        """The expected y; None before FEW were seen."""
        if self.seen < FEW:
            return None
        return max(0.0, sum(max(0.0, weight) * one for weight, one in zip(self.weights, x, strict=True)))

    def learn(self, x: Sequence[float], y: float) -> None:
        """One pair that was measured."""
        size = range(len(x))
        moved = [sum(self._spread[i][j] * x[j] for j in size) for i in size]
        gain_below = FORGET + sum(x[i] * moved[i] for i in size)
        error = y - sum(self.weights[i] * x[i] for i in size)
        for i in size:
            self.weights[i] += moved[i] / gain_below * error
        for i in size:
            for j in size:
                self._spread[i][j] = (self._spread[i][j] - moved[i] * moved[j] / gain_below) / FORGET
        for i in size:  # a direction in which nothing varies must not lose all it knew
            if self._spread[i][i] > self._limit[i]:
                scale = (self._limit[i] / self._spread[i][i]) ** 0.5
                for j in size:
                    self._spread[i][j] *= scale
                    self._spread[j][i] *= scale
        self.seen += 1


@dataclass
class Late:
    """By how much the answers under way are slower than others were, from the number of their events.

    interval: seconds between two events, by the requests that were there when the answer began. The sums are over the
    answers under way that have a token; each is half an interval behind its last event on average.
    """

    interval: Line = field(default_factory=lambda: Line((100.0, 1.0)))
    answers: int = 0
    _since: float = 0.0  # sum of the moments of their first tokens
    _events: float = 0.0
    _by_running: float = 0.0

    def begin(self, running: float, at: float) -> None:
        """The first token of an answer has come; running: requests there when it began, itself among them."""
        self.answers += 1
        self._since += at
        self.came(running, -0.5)

    def came(self, running: float, events: float) -> None:
        """So many more events of it have come."""
        self._events += events
        self._by_running += running * events

    def end(self, running: float, at: float, events: float, seconds: float) -> None:
        """It has ended. at: when its first token came. events: of it. seconds: from its first one to its last one."""
        self.answers -= 1
        self._since -= at
        self.came(running, 0.5 - events)
        if events > FEW:
            self.interval.learn((1.0, running), seconds / (events - 1))

    def factor(self, at: float) -> float:
        """1 to MOST_LATE: seconds that they have taken over seconds that so many events took before."""
        expected = self.interval.value((self._events, self._by_running)) if self._events >= ENOUGH else None
        return min(max((self.answers * at - self._since) / expected, 1.0), MOST_LATE) if expected else 1.0


@dataclass(frozen=True)
class Prediction:
    """Seconds. e2e: to the last token, for the number of tokens that the answer is expected to have."""

    ttft: float
    tpot: float
    e2e: float


@dataclass
class Timing:
    """The two lines of one backend, in seconds, what is under way there, and the greatest rate of prefill that was
    seen, in tokens a second."""

    ttft: Line = field(default_factory=lambda: Line((1.0, 1e-4, 1e-4)))
    tpot: Line = field(default_factory=lambda: Line((1.0, 1e-2)))
    late: Late = field(default_factory=Late)
    prefill_rate: float | None = None

    def learn_ttft(self, own: float, ahead: float, seconds: float) -> None:
        """own, ahead: tokens to prefill of this request, and of others that were before it."""
        self.ttft.learn((1.0, own, ahead), seconds)
        if own >= 16 and seconds > 0:
            self.prefill_rate = max(self.prefill_rate or 0.0, (own + ahead) / seconds)

    def learn_tpot(self, running: float, work: float, tokens: float, seconds: float) -> None:
        """running: requests when it began, itself among them. work, tokens: of a round, as above."""
        self.tpot.learn((1.0, running), seconds * tokens / work)

    def step(self, running: float) -> float | None:
        """Seconds of a plain step with so many requests; None where too little was seen."""
        return self.tpot.value((1.0, running))

    def first(self, own: float, ahead: float) -> float | None:
        """Seconds to the first token; None where too little was seen."""
        return self.ttft.value((1.0, own, ahead))
