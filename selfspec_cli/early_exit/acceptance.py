"""How much is accepted lately, and how long drafts should be for it. No torch.

A running estimate of the acceptance of a token picks a level of a small ladder of lengths. A level is entered a little
above the acceptance at which it begins to pay and left a little below it, so that noise does not move it to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec_cli.early_exit.cost_model import expected_tokens
from selfspec_cli.early_exit.estimate import clamped, reached, trials, updated

WEIGHT = 0.15
"""Of one verified token against all before it, for a request's own estimate."""
USUAL_WEIGHT = 0.03
"""The same for the engine's estimate, with which a request begins."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 512
"""Rounds without drafts before the first trial of whether they would be accepted again, and at most."""
NEVER = 2.0
"""In place of an acceptance: a level that no acceptance makes pay."""


@dataclass(frozen=True)
class Ladder:
    """Draft lengths in rising order, and the acceptances at which to climb to each and to leave it downwards.

    Level 0 is no drafts; level i drafts lengths[i - 1] tokens.
    """

    lengths: tuple[int, ...]
    rises: tuple[float, ...]
    falls: tuple[float, ...]

    @classmethod
    def of(cls, k: int, cost: float) -> Ladder:
        """For an engine that drafts at most `k` tokens. cost: of one draft token, in plain decoding steps."""
        lengths = tuple(sorted({*(2**power for power in range(k.bit_length()) if 2**power < k), k}))
        rises, falls = [], []
        for shorter, longer in zip((0, *lengths), lengths, strict=False):
            pays = _break_even(shorter, longer, cost)
            margin = 0.2 * pays * (1 - pays) if pays < 1 else 0.0
            rises.append(pays + margin)
            falls.append(pays - margin)
        return cls(lengths, tuple(rises), tuple(falls))

    def level(self, rate: float, current: int) -> int:
        """The level for an estimated acceptance, coming from another one."""
        low = high = 0
        for rise, fall in zip(self.rises, self.falls, strict=True):
            low, high = reached(low, rate, rise), reached(high, rate, fall)
        return int(clamped(current, low, high))

    def length(self, level: int) -> int:
        """Draft length of a level."""
        return self.lengths[level - 1] if level else 0


def _break_even(shorter: int, longer: int, cost: float) -> float:
    """The acceptance at which drafting `longer` tokens is as fast as drafting `shorter`; NEVER if none is."""

    def gain(rate: float) -> float:
        return expected_tokens(rate, longer) * (1 + cost * shorter) - expected_tokens(rate, shorter) * (
            1 + cost * longer
        )

    if gain(1.0) <= 0:
        return NEVER
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return high


@dataclass
class Probing:
    """When to try drafts again while there are none: after a pause that doubles with every failure."""

    pause: int = FIRST_PAUSE
    left: int = FIRST_PAUSE

    def due(self) -> bool:
        """Whether the round that begins is a trial; to be asked once a round."""
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = self.pause  # the answer may take some rounds
        return True

    def ended(self, success: bool) -> None:
        """Record how a trial ended. After a success the next round is a trial too."""
        self.pause = FIRST_PAUSE if success else min(2 * self.pause, LONGEST_PAUSE)
        self.left = 0 if success else self.pause


@dataclass
class RequestEstimate:
    """One request's acceptance and level, where each request may go without drafts on its own (the V1 runner)."""

    ladder: Ladder
    rate: float
    level: int
    probing: Probing = field(default_factory=Probing)

    @classmethod
    def beginning(cls, ladder: Ladder, usual: float) -> RequestEstimate:
        """Of a new request, by what is usual."""
        return cls(ladder, usual, ladder.level(usual, len(ladder.lengths)))

    def length(self) -> int:
        """Most tokens to draft in the round that begins; to be asked once a round."""
        if not self.level:
            return self.ladder.lengths[0] if self.probing.due() else 0
        return self.ladder.length(self.level)

    def verdict(self, accepted: int, drafted: int) -> None:
        """A round's drafts were verified; at least one was made."""
        before = self.level
        self.rate = updated(self.rate, accepted, trials(accepted, drafted), WEIGHT)
        self.level = self.ladder.level(self.rate, before)
        if not before and not self.level:
            self.probing.ended(accepted > 0)
        elif before and not self.level:
            self.probing = Probing()


class BatchSwitch:
    """Whether a batch is drafted for at all, where all of its requests are verified at as many places (the V2 runner).

    It uses the tokens that drafts gained lately, a request and a round, and knows nothing of how many were drafted:
    that happened on the device. A request that was never seen counts as what is usual.
    """

    def __init__(self, draft_cost: float) -> None:
        self._draft_cost = draft_cost
        self._gained: dict[str, float] = {}
        self._usual = 1.0  # tokens: enough to begin with drafts, and soon forgotten
        self._round: list[int] = []  # what the verdicts of one step gained
        self._trying = False
        self.on = True
        self.probing = Probing()

    def forget(self, requests: Sequence[str]) -> None:
        """These requests are gone."""
        for request in requests:
            self._gained.pop(request, None)

    def verdict(self, request: str, accepted: int) -> None:
        """A request had places for drafts verified, and gained so many tokens by them."""
        before = self._gained.get(request, self._usual)
        self._gained[request] = updated(before, accepted, 1, WEIGHT)
        self._usual = updated(self._usual, accepted, 1, USUAL_WEIGHT)
        self._round.append(accepted)

    def open(self, requests: Sequence[str], width: int, cost: float | None) -> bool:
        """Whether the round that begins is drafted for, `width` places a request; to be asked once a round.

        cost: of a round of `width` drafts beyond a plain step, in plain steps, where it was measured: with many
        requests the verify pass is a part of it.
        """
        verifying = 0.0 if cost is None else max(0.0, cost - width * self._draft_cost)
        if self._round and self._trying:
            self._trying = False
            self.probing.ended(self._pays(sum(self._round) / len(self._round), width, verifying, 1.0))
        self._round = []
        mean = self._usual  # of requests that were never seen: all of them, after a while without drafts
        if self._gained:
            mean = sum(self._gained.get(name, self._usual) for name in requests) / max(len(requests), 1)
        if self._pays(mean, width, verifying, 0.9 if self.on else 1.1):
            self.on = True
        elif self.on:
            self.on, self.probing = False, Probing()
        if not self.on and self.probing.due():
            self._trying = True
            return True
        return self.on

    def _pays(self, gained: float, width: int, verifying: float, margin: float) -> bool:
        # Of so many drafts that stand, about one more was made: the one that did not.
        return gained >= margin * (verifying + self._draft_cost * min(width, 1 + gained))
