"""An open loop: requests or bursts of them arrive as a Poisson process, whether or not others have ended."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat, takewhile
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern

BURSTY = "bursty"  # what rows call arrivals of several requests at a time


@dataclass
class PoissonSettings:
    """How many requests arrive, and how many of them together."""

    rate: float | None = knob(
        None,
        help="requests that arrive, whether or not others have ended (open loop)",
        unit="requests/s",
        above=0,
        unset="a closed loop",
    )
    share: float | None = knob(
        None,
        help="the rate as a share of the requests that the baseline completes in a closed loop",
        unit="fraction",
        above=0,
        high=4,
        unset="a closed loop, or a rate",
    )
    burst: int = knob(
        1, help="requests that arrive together; 1 is a Poisson process, more are Poisson bursts", unit="requests", low=1
    )


def poisson(rate: float, seed: int, *, burst: int = 1) -> Iterator[float]:
    """Yield arrival times (seconds, rising, without end): of bursts as a Poisson process of `rate / burst` a second."""
    draw = random.Random(f"arrivals {seed}")
    moment = 0.0
    while True:
        moment += draw.expovariate(rate / burst)
        yield from repeat(moment, burst)


def moments(rate: float, seed: int, burst: int, requests: int | None, seconds: float | None) -> list[float]:
    """Return the arrival times of one run: the first `requests`, or all within `seconds`; at least one burst."""
    arriving = poisson(rate, seed, burst=burst)
    if seconds is None:
        return list(islice(arriving, requests))
    first = list(islice(arriving, burst))
    return first + list(takewhile(lambda moment: moment < seconds, arriving))


class Poisson(LoadPattern):
    name = "poisson"
    help = "requests, or bursts of load.burst of them, arrive at random moments, load.rate requests a second on average"
    settings = PoissonSettings
    columns = ("rate", "load_share", "burst")
    rank = 1
    in_every_key = True

    def asked(self, load: Any) -> bool:
        return load.rate is not None or load.share is not None or (load.burst > 1 and load.clients is not None)

    def problem(self, load: Any) -> str | None:
        if load.rate is None and load.share is None:
            return (
                f"load.burst={load.burst} with load.clients={load.clients}: bursts arrive at a rate; give "
                "load.rate or load.share"
            )
        if load.rate is not None and (load.clients is not None or load.share is not None):
            other = "clients" if load.clients is not None else "share"
            return (
                f"load.rate={load.rate:g} and load.{other}={getattr(load, other)}: give one of them; requests "
                "arrive at a rate, or each client sends its own when the last one has ended"
            )
        return None

    def arrivals(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> list[float]:
        return moments(load.rate, seed, load.burst, requests, seconds)  # a share has been turned into a rate before

    def values(self, load: Any) -> dict[str, Any]:
        return {
            "arrivals": BURSTY if load.burst > 1 else self.name,
            "rate": load.rate,
            "load_share": load.share,
            "burst": load.burst,
        }

    def matches(self, row: Any) -> bool:
        return row.arrivals in (self.name, BURSTY)

    def label(self, row: Any) -> str:
        rate = f"{row.rate:.3g} requests/s" if row.rate is not None else ""
        share = f"{row.load_share:.0%} of the baseline's saturation" if row.load_share is not None else ""
        words = f"{rate} ({share})" if rate and share else rate or share
        return f"{words} in bursts of {row.burst}" if row.arrivals == BURSTY else words


PATTERN = Poisson()
