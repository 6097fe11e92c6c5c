"""A closed loop whose number of clients goes down and up again in each period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern, Schedule


@dataclass
class AlternatingSettings:
    """How many clients continue, and how often the others come back."""

    low_clients: int | None = knob(
        None,
        help="clients of a closed loop that ask all the time; the others ask only in the first half of each period",
        unit="clients",
        low=1,
        unset="all clients ask all the time",
    )
    period: float = knob(10.0, help="time after which all clients ask again, with low_clients", unit="s", above=0)


class Alternating(LoadPattern):
    """All clients in the first half of each period, `low_clients` of them in the second."""

    name = "alternating"
    help = "a closed loop of which load.low_clients go on asking in the second half of each load.period"
    settings = AlternatingSettings
    columns = ("low_clients", "period")

    def asked(self, load: Any) -> bool:
        """Whether a smaller number of clients is given."""
        return load.low_clients is not None

    def problem(self, load: Any) -> str | None:
        """Require a smaller number than `clients`, in a closed loop."""
        opened = load.rate is not None or load.share is not None
        if opened or load.clients is None or load.low_clients >= load.clients:
            return (
                f"load.low_clients={load.low_clients} with load.clients={load.clients}: of a closed loop "
                "(load.clients) it is the smaller number of clients, which ask all the time"
            )
        return None

    def schedule(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> Schedule:
        """Return two levels per period."""
        return Schedule(load.clients, ((0.0, load.clients), (load.period / 2, load.low_clients)), load.period)

    def values(self, load: Any) -> dict[str, Any]:
        """Return the columns of a closed loop, and two more."""
        return {"arrivals": "closed", "clients": load.clients, "low_clients": load.low_clients, "period": load.period}

    def matches(self, row: Any) -> bool:
        """See `values`."""
        return row.low_clients is not None

    def label(self, row: Any) -> str:
        """Such as: 128 and 8 clients, alternating every 5 s."""
        return f"{row.clients} and {row.low_clients} clients, alternating every {(row.period or 0) / 2:g} s"


PATTERN = Alternating()
