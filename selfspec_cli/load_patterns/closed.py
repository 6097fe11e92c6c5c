"""A closed loop: each client asks again when its request has ended; some of them in half of each period alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern, Schedule


@dataclass
class ClosedSettings:
    """How many clients ask, how many of them all the time, and how often the others come back."""

    clients: int | None = knob(
        None,
        help="clients of a closed loop, each of which asks again when its request has ended; with share, those that "
        "find the saturation",
        unit="clients",
        low=1,
        unset="8, where nothing else says how much to ask",
    )
    low_clients: int | None = knob(
        None,
        help="clients of a closed loop that ask all the time; the others ask only in the first half of each period",
        unit="clients",
        low=1,
        unset="all clients ask all the time",
    )
    period: float = knob(10.0, help="time after which all clients ask again, with low_clients", unit="s", above=0)


class Closed(LoadPattern):
    """All clients all the time; or all in the first half of each period, and `low_clients` of them in the second."""

    name = "closed"
    help = (
        "each client asks again when its request has ended (load.clients), or only load.low_clients of them in the "
        "second half of each load.period"
    )
    settings = ClosedSettings
    columns = ("clients", "low_clients", "period")
    rank = 0
    in_every_key = True

    def asked(self, load: Any) -> bool:
        """Whether clients are given."""
        return load.clients is not None or load.low_clients is not None

    def unused(self, load: Any) -> list[str]:
        """See `LoadPattern.unused`."""
        return [] if load.low_clients is not None else ["low_clients", "period"]

    def problem(self, load: Any) -> str | None:
        """Require a request for each client, and fewer `low_clients` than clients."""
        opened = load.rate is not None or load.share is not None
        if load.low_clients is not None and (opened or load.clients is None or load.low_clients >= load.clients):
            return (
                f"load.low_clients={load.low_clients} with load.clients={load.clients}: of a closed loop "
                "(load.clients) it is the smaller number of clients, which ask all the time"
            )
        if load.requests is not None and load.requests < load.clients and load.share is None:
            return (
                f"load.requests={load.requests} with load.clients={load.clients}: fewer requests than clients; use "
                f"load.requests={load.clients} or more"
            )
        return None

    def schedule(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> Schedule:
        """Return all clients from the beginning to the end, or two levels per period."""
        if load.low_clients is not None:
            return Schedule(load.clients, ((0.0, load.clients), (load.period / 2, load.low_clients)), load.period)
        return Schedule(clients=load.clients)

    def values(self, load: Any) -> dict[str, Any]:
        """See `LoadPattern.values`."""
        unused = self.unused(load)
        return {"arrivals": self.name} | {name: getattr(load, name) for name in self.columns if name not in unused}

    def label(self, row: Any) -> str:
        """Return the load in words: 8 clients; 128 and 8 clients, alternating every 5 s."""
        if row.low_clients is not None:
            return f"{row.clients} and {row.low_clients} clients, alternating every {(row.period or 0) / 2:g} s"
        return f"{row.clients} client{'s' if row.clients > 1 else ''}"


PATTERN = Closed()
