"""When the requests of an open loop arrive, and how many: pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, repeat, takewhile


def poisson(rate: float, seed: int, *, burst: int = 1) -> Iterator[float]:
    """Moments (seconds from the beginning, rising, without end) at which requests arrive.

    Bursts of `burst` requests each arrive as a Poisson process of `rate / burst` bursts a second, so that the mean rate
    is `rate` requests a second whatever the burst. The first one arrives after a random time, too.
    """
    draw = random.Random(f"arrivals {seed}")
    moment = 0.0
    while True:
        moment += draw.expovariate(rate / burst)
        yield from repeat(moment, burst)


def schedule(
    rate: float, seed: int, *, burst: int = 1, requests: int | None = None, seconds: float | None = None
) -> list[float]:
    """The arrivals of one run: the first `requests`, or all within `seconds`; at least one burst.

    Exactly one of `requests` and `seconds` is given.
    """
    moments = poisson(rate, seed, burst=burst)
    if requests is not None:
        return list(islice(moments, requests))
    assert seconds is not None
    return list(takewhile(lambda moment: moment < seconds, moments)) or list(
        islice(poisson(rate, seed, burst=burst), burst)
    )
