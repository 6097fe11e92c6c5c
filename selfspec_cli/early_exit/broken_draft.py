"""Whether drafts are accepted so rarely that what makes them must be broken: a copy with a wrong scale, stale weights.

Output is right whatever drafts, so nothing else shows it; the engine is only slower than a plain one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_OF_COPIES = 0.3
"""First drafts accepted, of copies of all layers that are right: 4 bits on tiny random models, the worst measured."""
LEAST_OF_LAYERS = 0.02
"""The same of early layers: 8 of 30 of an ordinary model have 0.05 (SmolLM2-135M-Instruct)."""
CERTAIN = 1e-6
"""Probability below which what was accepted is no accident: one false warning in a million engines."""


@dataclass(frozen=True)
class Finding:
    """What acceptance says of a draft. warning: for the log, None for a draft that may be right; gives_up: nothing was
    accepted, so that drafting is switched off."""

    warning: str | None = None
    gives_up: bool = False


def look(judged: int, accepted: int, copies_all_layers: bool) -> Finding:
    """Look at the first draft of each round so far.

    judged: first drafts that were verified; accepted: of these. copies_all_layers: drafts are made by copies of all of
    the target's layers, which nearly are the target. Says nothing before there are enough to be certain: 39 without a
    single one accepted for copies, 684 for early layers.
    """
    least = LEAST_OF_COPIES if copies_all_layers else LEAST_OF_LAYERS
    if accepted >= least * judged or at_most(accepted, judged, least) >= CERTAIN:
        return Finding()
    made = "copies of all layers" if copies_all_layers else "early layers"
    consequence = "nothing more is drafted" if not accepted else "decoding is slower than it can be"
    return Finding(
        f"only {accepted} of {judged} first drafts were accepted, where {made} reach {least:.0%} or more: the draft "
        f"seems broken (weights that were replaced, a wrong scale, layers left out); output is right, and {consequence}"
        ". `selfspec verify` and `selfspec ppl` look closer",
        gives_up=not accepted,
    )


def at_most(accepted: int, judged: int, chance: float) -> float:
    """Probability of no more than `accepted` successes of `judged`, each with `chance` (binomial distribution)."""
    odds = math.log(chance) - math.log1p(-chance)
    term = judged * math.log1p(-chance)  # of no success
    found = math.exp(term)
    for number in range(1, accepted + 1):
        term += math.log((judged - number + 1) / number) + odds
        found += math.exp(term)
    return min(found, 1.0)
