"""Load patterns: how the requests of a load test arrive. One module per pattern, with one object `PATTERN`.

`LoadConfig` has the settings of every pattern; the given settings decide which pattern is used. Other packages add
patterns by entry points of the group "selfspec.load_patterns". Loads that agree in `COLUMNS` can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.load_patterns.base import LoadPattern

PATTERNS = Registry("load pattern", LoadPattern, "selfspec_cli.load_patterns", "selfspec.load_patterns", first="closed")

if TYPE_CHECKING:
    from selfspec_cli.load_patterns.closed import ClosedSettings
    from selfspec_cli.load_patterns.poisson import PoissonSettings
    from selfspec_cli.load_patterns.trace import TraceSettings

    @dataclass
    class PatternSettings(ClosedSettings, PoissonSettings, TraceSettings):
        """The settings of every pattern, as far as a type checker knows them."""

else:
    PatternSettings = make_dataclass(
        "PatternSettings", [], bases=tuple(one.settings for one in PATTERNS.values())[::-1]
    )

COLUMNS = ("arrivals", *(name for one in PATTERNS.values() for name in one.columns))
"""The columns of a row that describe the requests to a server; equal values mean equal loads."""


def _asked(load: Any) -> list[LoadPattern]:
    return [pattern for pattern in PATTERNS.values() if pattern.asked(load)]


def chosen(load: Any) -> LoadPattern | None:
    """Return the pattern whose settings a load config gives, of several the highest in rank; None without a load."""
    return max(_asked(load), key=lambda pattern: pattern.rank, default=None)


def problem(load: Any) -> str | None:
    """Return why the settings of a load config contradict each other; None if they do not."""
    patterns = _asked(load)
    for pattern in patterns:
        if (reason := pattern.problem(load)) is not None:
            return reason
    highest = max((pattern.rank for pattern in patterns), default=0)
    names = [pattern.name for pattern in patterns if pattern.rank == highest]
    if len(names) > 1:
        return f"the settings of load ask for the patterns {' and '.join(names)}: give those of one"
    return None


def unused_settings(load: Any) -> list[str]:
    """Return the settings that a load's key leaves out: those of patterns that are not used."""
    used = chosen(load)
    others = (pattern for pattern in PATTERNS.values() if pattern is not used and not pattern.in_every_key)
    return [item.name for pattern in others for item in fields(pattern.settings)]


def columns(load: Any) -> dict[str, Any]:
    """Return `COLUMNS` of a load test; columns of other patterns are None."""
    pattern = chosen(load)
    assert pattern is not None
    return dict.fromkeys(COLUMNS) | pattern.values(load)


def label(row: Any) -> str:
    """Return a row's load in words; without a pattern that is installed, its column `arrivals`."""
    matching = [pattern for pattern in PATTERNS.values() if pattern.matches(row)]
    return max(matching, key=lambda pattern: pattern.rank).label(row) if matching else str(row.arrivals)


def comparable(row: Any, *, without: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return the values in which comparable loads agree; not a rate that follows from a share of saturation. row: has
    `COLUMNS`, as attributes or as a mapping. without: columns that an axis of a figure shows."""
    get = row.get if isinstance(row, Mapping) else lambda name: getattr(row, name)
    left_out = {*without, *(["rate"] if get("load_share") is not None else [])}
    return tuple(get(name) for name in COLUMNS if name not in left_out)
