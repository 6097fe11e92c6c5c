"""Which threshold and draft length, by Thompson sampling on tokens per time. No torch.

Each arm is a threshold of the gate in force with a draft length, or no drafts. Before a round, what a round of each arm
would yield is drawn from what is known of it, and the arm with the most tokens in the time of a plain decoding step has
the round (W. R. Thompson, "On the likelihood that one unknown probability exceeds another", Biometrika 1933).

Arms behind one threshold differ only in where they end, so they share what is known: for each place of a draft, how
often one more token stood where all before it had (a beta distribution), and how often one more step was taken. A short
draft that fails speaks against the long ones. What is long past is forgotten, so traffic may change.

A round's time is counted and not measured, for many a host does not wait for its device: a plain step, and `draft_cost`
for each draft step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from selfspec_cli.early_exit.acceptance import Ladder
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.thresholds import stricter_than

MEMORY = 400.0
"""Rounds after which what a round yielded counts for 1/e."""


@dataclass(frozen=True)
class Arm:
    """What a round does. threshold: of the gate in force, None for its own; k: most tokens drafted, 0 for none."""

    threshold: float | None
    k: int


class Known:
    """What is known of drafts behind one threshold, by place of the draft, from 0: of the requests that came so far,
    how many went on and how many did not. stood, failed: tokens; went, ended: draft steps."""

    def __init__(self, k: int) -> None:
        self.stood, self.failed = [0.0] * k, [0.0] * k
        self.went, self.ended = [0.0] * k, [0.0] * k

    def fade(self, share: float) -> None:
        """A round has gone by: so much of everything is left."""
        for counts in (self.stood, self.failed, self.went, self.ended):
            counts[:] = [count * share for count in counts]

    def add(self, accepted: int, steps: int, k: int) -> None:
        """A request drafted `steps` tokens where it might have drafted `k`, and so many of them stood."""
        for counts, others, last in ((self.stood, self.failed, accepted), (self.went, self.ended, steps)):
            for place in range(last):
                counts[place] += 1
            if last < k:
                others[last] += 1

    def drawn_tokens(self, draw: random.Random) -> list[float]:
        """Of a round of each length from 0 on: how many tokens it yields, drawn from what is known."""
        shares = (draw.betavariate(1 + stood, 1 + failed)
                  for stood, failed in zip(self.stood, self.failed, strict=True))  # fmt: skip
        return _sums(1.0, shares)

    def steps(self) -> list[float]:
        """Draft steps of a round of each length, in the mean. Before any round all of them are taken."""
        return _sums(0.0, ((1 + went) / (1 + went + ended)
                           for went, ended in zip(self.went, self.ended, strict=True)))  # fmt: skip


def _sums(start: float, shares: Iterable[float]) -> list[float]:
    """start, and what is added by each place that is reached: start + s0, start + s0 + s0 s1, ..."""
    found, reached = [start], 1.0
    for share in shares:
        reached *= share
        found.append(found[-1] + reached)
    return found


def arms(gate: str, threshold: float | None, k: int) -> tuple[Arm, ...]:
    """No drafts; every length of the ladder up to k; and each of two and more tokens behind a stricter gate, too."""
    rule, lengths = GATES[gate], Ladder.of(k, 0.0).lengths
    stricter = stricter_than(gate, rule.default if threshold is None else threshold)
    found = [Arm(None, 0), *(Arm(None, length) for length in lengths)]
    return (*found, *(Arm(stricter, length) for length in lengths if stricter is not None and length > 1))


class Bandit:
    """Chooses an arm for each round, and hears what it yielded. The same seed and the same rounds choose the same arms,
    so that all ranks of an engine do."""

    def __init__(self, choices: tuple[Arm, ...], draft_cost: float, seed: int = 0) -> None:
        self.arms = choices
        self._cost, self._random = draft_cost, random.Random(f"bandit {seed}")
        longest = max(arm.k for arm in choices)
        self._known = {arm.threshold: Known(longest) for arm in choices}

    def choose(self) -> Arm:
        """The arm of the round that begins."""
        drawn = {limit: (known.drawn_tokens(self._random), known.steps()) for limit, known in self._known.items()}
        return max(self.arms, key=lambda arm: self._speed(*drawn[arm.threshold], arm.k))

    def learn(self, arm: Arm, requests: Iterable[tuple[int, int]]) -> None:
        """A round of `arm` is over. requests: of each that was drafted for, the tokens accepted and drafted."""
        for known in self._known.values():
            known.fade(1 - 1 / MEMORY)
        for accepted, steps in requests:
            self._known[arm.threshold].add(accepted, steps, arm.k)

    def _speed(self, tokens: list[float], steps: list[float], k: int) -> float:
        """Tokens of a request in the time of a plain step, where drafts have k tokens."""
        return tokens[k] / (1 + self._cost * steps[k])  # exactly 1 without drafts
