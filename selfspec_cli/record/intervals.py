"""How sure a speedup is: a bootstrap interval over the repeats of both sides. And a perplexity: over its documents.

Percentile intervals, not BCa: BCa's acceleration is a jackknife's, and the median of three to five repeats takes two or
three values under a jackknife, so that it is wild, and undefined where repeats are equal. With so few repeats the
interval reaches about from the slowest to the fastest pair, and it may cover less than its nominal 95 %; more repeats
help.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

LEVEL = 0.95
RESAMPLES = 4999
FEWER = 999  # of thousands of values each, while a gateway serves
SEED = 0  # the same repeats have the same interval, whenever it is worked out

Interval = tuple[float, float]


def speedup_interval(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> Interval | None:
    """The 95 % interval of median(ours) / median(theirs), tokens a second of the repeats of both sides.

    Args:
        paired: the sides took turns, so that repeat i of one is to be resampled with repeat i of the other; otherwise
            each is resampled by itself.

    Returns:
        None where one side has fewer than two repeats: nothing says how much it varies.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    return _interval(tuple(ours), tuple(theirs), paired)


def mean_ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """The 95 % interval of mean(above) / mean(below), each side resampled by itself.

    Returns:
        None where one side has fewer than two values, or the values below are all 0.
    """
    if min(len(above), len(below)) < 2 or not any(below):
        return None
    return _of_means(tuple(above), tuple(below))


def perplexity_interval(
    nats: Sequence[float],
    tokens: Sequence[int],
    other_nats: Sequence[float] | None = None,
    other_tokens: Sequence[int] | None = None,
) -> Interval | None:
    """The 95 % interval of a perplexity, or of its difference to another one of the same documents.

    Documents are resampled, never tokens: tokens of one document depend on each other. Of two sides the same documents
    are drawn for both.

    Args:
        nats, tokens: negative log-likelihood and scored tokens of each document.
        other_nats, other_tokens: likewise of the other side, document by document; its perplexity is taken away.

    Returns:
        None for fewer than two documents: nothing says how much they vary.
    """
    if len(nats) < 2:
        return None
    sides = [tuple(nats), tuple(map(float, tokens))]
    if other_nats is not None and other_tokens is not None:
        sides += [tuple(other_nats), tuple(map(float, other_tokens))]
    return _of_documents(tuple(sides))


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a value in common."""
    return one[0] <= other[1] and other[0] <= one[1]


@lru_cache(maxsize=4096)
def _interval(ours: tuple[float, ...], theirs: tuple[float, ...], paired: bool) -> Interval:
    import numpy

    def ratio(a: Any, b: Any, axis: int = -1) -> Any:
        return numpy.median(a, axis=axis) / numpy.median(b, axis=axis)

    # scipy.stats.bootstrap takes the ends from the resampled ratios themselves: no normal approximation.
    return _resampled((ours, theirs), ratio, paired)


@lru_cache(maxsize=64)
def _of_means(above: tuple[float, ...], below: tuple[float, ...]) -> Interval:
    import numpy

    draw = numpy.random.default_rng(SEED)

    def means(values: tuple[float, ...]) -> Any:
        side = numpy.asarray(values)  # a resample at a time: thousands of values times thousands of resamples are large
        return numpy.array([side[draw.integers(0, len(side), len(side))].mean() for _ in range(FEWER)])

    with numpy.errstate(divide="ignore"):
        ratios = means(above) / means(below)
    half = 50 * (1 - LEVEL)
    low, high = numpy.percentile(ratios, [half, 100 - half], method="nearest")  # a ratio may be infinite
    return float(low), float(high)


@lru_cache(maxsize=4096)
def _of_documents(sides: tuple[tuple[float, ...], ...]) -> Interval:
    import numpy

    def difference(*drawn: Any, axis: int = -1) -> Any:
        sums = [numpy.sum(side, axis=axis) for side in drawn]
        ours = numpy.exp(sums[0] / sums[1])
        return ours if len(sums) == 2 else ours - numpy.exp(sums[2] / sums[3])

    return _resampled(sides, difference, True)


def _resampled(sides: Sequence[Sequence[float]], statistic: Any, paired: bool) -> Interval:
    from scipy.stats import bootstrap

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
