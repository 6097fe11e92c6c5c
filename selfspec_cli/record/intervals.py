"""How sure a speedup is: a bootstrap interval over the repeats of both sides. And a perplexity: over its documents.

Percentile intervals, not BCa: BCa's acceleration is a jackknife's, and the median of three to five repeats takes two or
three values under a jackknife, so that it is wild, and undefined where repeats are equal. With so few repeats the
interval reaches about from the slowest to the fastest pair, and it may cover less than its nominal 95 %; more repeats
help.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

LEVEL = 0.95
RESAMPLES = 4999
SEED = 0  # the same repeats have the same interval, whenever it is worked out

Interval = tuple[float, float]


def speedup_interval(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> Interval | None:
    """The 95 % interval of median(ours) / median(theirs), tokens a second of the repeats of both sides; None where one
    side has fewer than two repeats, because nothing says how much it varies. paired: the sides took turns, so that
    repeat i of one is resampled with repeat i of the other, and not by itself."""
    return _bootstrap(_ratio_of_medians, (tuple(ours), tuple(theirs)), paired)


def perplexity_interval(*sides: Sequence[float]) -> Interval | None:
    """The 95 % interval of a perplexity, or of its difference to another one of the same documents; None for fewer than
    two documents. Documents are resampled, the same for both sides, never tokens: those of one document depend on each
    other.

    sides: negative log-likelihood (nats) and scored tokens of each document; then, if its perplexity is to be taken
    away, likewise of the other side, document by document.
    """
    return _bootstrap(_perplexity, tuple(map(tuple, sides)), True)


def overlap(one: Interval, other: Interval) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _ratio_of_medians(ours: Any, theirs: Any, axis: int) -> Any:
    import numpy

    return numpy.median(ours, axis=axis) / numpy.median(theirs, axis=axis)


def _perplexity(*sides: Any, axis: int) -> Any:
    import numpy

    nats, tokens, *others = [side.sum(axis=axis) for side in sides]
    ours = numpy.exp(nats / tokens)
    return ours - numpy.exp(others[0] / others[1]) if others else ours


@lru_cache(maxsize=4096)
def _bootstrap(statistic: Callable[..., Any], sides: tuple[tuple[float, ...], ...], paired: bool) -> Interval | None:
    if min(map(len, sides)) < 2:
        return None
    from scipy.stats import bootstrap

    # It takes the ends from the resampled statistics themselves: no normal approximation.
    interval = bootstrap(
        sides,
        statistic,
        n_resamples=RESAMPLES,
        paired=paired,
        vectorized=True,
        method="percentile",
        confidence_level=LEVEL,
        random_state=SEED,
    ).confidence_interval
    return float(interval.low), float(interval.high)
