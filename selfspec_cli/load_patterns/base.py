"""What a load pattern is. It runs in no server and in no client: it says what to ask, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """What the clients of one run do. Exactly one of clients and arrivals is given.

    clients: of a closed loop, each of which asks again when its request has ended. levels: (seconds, clients), rising
    in seconds from 0 on: from that moment on the first so many clients may begin requests, and the others wait; empty
    where all may, always. period: seconds after which the levels begin again; None: the last one lasts. arrivals:
    moments of an open loop (seconds from the beginning, rising).
    """

    clients: int | None = None
    levels: tuple[tuple[float, int], ...] = ()
    period: float | None = None
    arrivals: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.arrivals is None):
            raise ValueError("a schedule has clients, or arrivals")
        moments = [moment for moment, _ in self.levels]
        if self.levels and (moments[0] != 0 or moments != sorted(set(moments))):
            raise ValueError(f"the levels of a schedule begin at 0 and rise in time; given {self.levels}")
        lasting = [clients for _, clients in (self.levels if self.period is not None else self.levels[-1:])]
        if self.levels and max(lasting) != self.clients:
            raise ValueError(f"some of {self.clients} clients would wait for ever; given {self.levels}")


class LoadPattern:
    """A pattern. The object has no state: a load config (`LoadConfig`, with the settings of all patterns) is handed to
    its methods.

    name: of the pattern. help: one line. settings: a dataclass of `knob`s, whose fields become settings `load.NAME`.
    columns: columns of a row that hold its settings, where there are such (record/tables.py); a pattern without any is
    written in the column `arrivals`. rank: of the patterns whose settings are given, the one of greatest rank is in
    force: 0 a closed loop, 1 an open loop, 2 what makes something else of one of these. in_every_key: its settings are
    in the key of every load test, as they were before there were others; False for a new pattern.
    """

    name: str
    help: str
    settings: type
    columns: tuple[str, ...] = ()
    rank: int = 2
    in_every_key: bool = False

    def asked(self, load: Any) -> bool:
        """Whether its settings are given."""
        raise NotImplementedError

    def problem(self, load: Any) -> str | None:
        """Why its settings do not go together with each other or with the rest, and what to do; None where they do."""
        return None

    def schedule(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> Schedule:
        """What the clients of a run do: `requests` requests, or those that begin within `seconds`, one of which is
        given. The same for the same seed."""
        raise NotImplementedError

    def at_once(self, load: Any) -> int:
        """Requests that may begin together: a server is warmed up with so many."""
        return load.clients or 1

    def values(self, load: Any) -> dict[str, Any]:
        """The columns of its rows: `arrivals` and `columns`, and those of another pattern that it makes use of."""
        own = ", ".join(f"{item.name}={getattr(load, item.name):g}" for item in fields(self.settings))
        return {"arrivals": f"{self.name} ({own})", "clients": load.clients}

    def matches(self, row: Any) -> bool:
        """Whether a row with `arrivals` is of this pattern."""
        return str(row.arrivals).partition(" ")[0] == self.name

    def label(self, row: Any) -> str:
        """How much was asked, in words, from the columns of a row."""
        return str(row.arrivals)
