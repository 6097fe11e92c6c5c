"""An open loop of bursts: requests that arrive together, the bursts as a Poisson process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.poisson import Poisson


@dataclass
class BurstySettings:
    """How many arrive together."""

    burst: int = knob(
        1, help="requests that arrive together; 1 is a Poisson process, more are Poisson bursts", unit="requests", low=1
    )


class Bursty(Poisson):
    """The same mean rate, `burst` requests at a time."""

    name = "bursty"
    help = "bursts of load.burst requests arrive at random moments, load.rate requests a second on average"
    settings = BurstySettings
    columns = ("burst",)
    rank = 2

    def asked(self, load: Any) -> bool:
        """Whether more than one request arrives at a time, in a load test."""
        return load.burst > 1 and (super().asked(load) or load.clients is not None)

    def problem(self, load: Any) -> str | None:
        """Require an open loop."""
        if not super().asked(load):
            return (
                f"load.burst={load.burst} with load.clients={load.clients}: bursts arrive at a rate; give "
                "load.rate or load.share"
            )
        return None

    def at_once(self, load: Any) -> int:
        """Return the size of a burst."""
        return load.clients or load.burst

    def label(self, row: Any) -> str:
        """Return the rate, and how many requests arrive together."""
        return f"{super().label(row)} in bursts of {row.burst}"


PATTERN = Bursty()
