"""The log of a gateway's requests, and what each route gained over the baseline.

Which requests are the baseline is drawn at random, so the two sides are alike. The gain is the plain side's mean of
seconds or money a token over a route's, with a 95 % interval by bootstrap (`statistics`); above 1 it is a win.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from selfspec_cli.record.statistics import LEVEL, SEED, Interval

FOLDER = "gateway"  # in the results folder
KEPT = 2000  # newest requests of a route
RESAMPLES = 999  # of thousands of values each, while a gateway serves
ALL = "all"  # routes together
ASKED_FOR = "asked_for"  # the reason of a request whose client named the backend


@dataclass(frozen=True)
class Gain:
    """gain: plain over routed, in low..high; None without two requests on each side. of: seconds or money."""

    model: str
    route: str
    of: str
    requests: int
    plain_requests: int
    gain: float | None
    low: float | None
    high: float | None


class Ledger:
    """Seconds and money a token, by model and route; the plain side is under the route None."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[tuple[str, str | None], deque[float]]] = {"seconds": {}, "money": {}}

    def add(self, row: Mapping[str, Any]) -> None:
        """A line of the log. A request whose client named the backend was not routed, and counts on no side."""
        tokens, route, model = row.get("tokens"), row.get("route"), str(row.get("model") or "")
        if row.get("status") != 200 or not tokens or route is None or row.get("reason") == ASKED_FOR:
            return
        seconds, cost = row.get("e2e_ms"), 0.0 if row.get("cache") == "hit" else row.get("cost")
        for of, value in (("seconds", None if seconds is None else seconds / 1000), ("money", cost)):
            if value is None:
                continue
            for key in [None] if row.get("plain") else [route, ALL]:
                self.kept[of].setdefault((model, key), deque(maxlen=KEPT)).append(value / tokens)

    def gains(self) -> list[Gain]:
        """Of every model and route, and of all routes of a model together."""
        return [
            _gain(model, route, of, tuple(kept[model, route]), tuple(kept.get((model, None), ())))
            for of, kept in self.kept.items()
            for model, route in sorted((model, route) for model, route in kept if route is not None)
        ]


def _gain(model: str, route: str, of: str, ours: tuple[float, ...], plain: tuple[float, ...]) -> Gain:
    if min(len(ours), len(plain)) < 2 or sum(ours) == 0:
        return Gain(model, route, of, len(ours), len(plain), None, None, None)
    ratio = (sum(plain) / len(plain)) / (sum(ours) / len(ours))
    return Gain(model, route, of, len(ours), len(plain), ratio, *_interval(plain, ours))


@lru_cache(maxsize=64)
def _interval(above: tuple[float, ...], below: tuple[float, ...]) -> Interval:
    """The 95 % interval of mean(above) / mean(below), each side resampled by itself."""
    import numpy

    draw = numpy.random.default_rng(SEED)

    def means(values: tuple[float, ...]) -> Any:
        side = numpy.asarray(values)  # a resample at a time: thousands of values times thousands of resamples are large
        return numpy.array([side[draw.integers(0, len(side), len(side))].mean() for _ in range(RESAMPLES)])

    with numpy.errstate(divide="ignore"):
        ratios = means(above) / means(below)
    half = 50 * (1 - LEVEL)
    low, high = numpy.percentile(ratios, [half, 100 - half], method="nearest")  # a ratio may be infinite
    return float(low), float(high)
