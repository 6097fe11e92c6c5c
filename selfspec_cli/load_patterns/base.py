"""The base class of load patterns. A pattern describes requests in plain values; it runs in no server and no client."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any


class LoadPattern:
    """A pattern, without state: its methods get a load config (`LoadConfig`, with the settings of all patterns).

    help: one line. settings: a dataclass of `knob`s, the settings `load.NAME`. columns: of a row, that hold its
    settings (record/tables.py); without any it is written in `arrivals`. rank: the highest of the patterns whose
    settings are given is used: 0 a closed loop, 1 an open loop, 2 a variant of these, 3 a trace. in_every_key: its
    settings are in the key of every load test, as in older results; False for a new pattern.
    """

    name: str
    help: str
    settings: type
    columns: tuple[str, ...] = ()
    rank: int = 2
    in_every_key: bool = False

    def asked(self, load: Any) -> bool:
        """Whether a load config gives this pattern's settings."""
        raise NotImplementedError

    def problem(self, load: Any) -> str | None:
        """Return why its settings contradict each other or others, and what to do; None if they do not."""
        return None

    def arrivals(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> Sequence[float] | None:
        """Return the times of an open loop (seconds from the beginning, rising), equal for equal seeds; None for a
        closed loop of `load.clients`. Exactly one of `requests` and `seconds`, which limit the run, is given."""
        return None

    def values(self, load: Any) -> dict[str, Any]:
        """Return the columns of its rows: `arrivals`, `columns`, and columns of a pattern on which it builds."""
        settings = ", ".join(f"{item.name}={getattr(load, item.name):g}" for item in fields(self.settings))
        return {"arrivals": f"{self.name} ({settings})", "clients": load.clients}

    def matches(self, row: Any) -> bool:
        """Whether a row with `arrivals` is of this pattern."""
        return str(row.arrivals).partition(" ")[0] == self.name

    def label(self, row: Any) -> str:
        """Return the load in words, from the columns of a row."""
        return str(row.arrivals)
