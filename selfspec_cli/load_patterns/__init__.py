"""Load patterns: how the requests of a load test arrive. One module a pattern, with one object `PATTERN`.

`LoadConfig` has the settings of every pattern; which of them are given decides which pattern is in force. Other
packages add theirs by entry points of the group "selfspec.load_patterns". What makes two loads comparable is `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.load_patterns.base import LoadPattern

PATTERNS = Registry(
    "load pattern", LoadPattern, "selfspec_cli.load_patterns", "PATTERN", "selfspec.load_patterns", first="closed"
)
FRONTEND = "frontend"

if TYPE_CHECKING:
    from selfspec_cli.load_patterns.alternating import AlternatingSettings
    from selfspec_cli.load_patterns.bursty import BurstySettings
    from selfspec_cli.load_patterns.closed import ClosedSettings
    from selfspec_cli.load_patterns.poisson import PoissonSettings

    @dataclass
    class PatternSettings(ClosedSettings, AlternatingSettings, PoissonSettings, BurstySettings):
        """The settings of every pattern, as far as a type checker knows them."""

else:
    PatternSettings = make_dataclass(
        "PatternSettings", [], bases=tuple(one.settings for one in PATTERNS.values())[::-1]
    )

COLUMNS = ("arrivals", *(name for one in PATTERNS.values() for name in one.columns), FRONTEND)
"""The columns of a row that say what was asked of a server: points that agree in them were asked the same."""


def chosen(load: Any) -> LoadPattern | None:
    """The pattern whose settings a load config gives; of several the most special. None for what is no load test."""
    asked = [one for one in PATTERNS.values() if one.asked(load)]
    return max(asked, key=lambda one: one.rank) if asked else None


def problem(load: Any) -> str | None:
    """Why the settings of a load config do not go together; None where they do."""
    asked = [one for one in PATTERNS.values() if one.asked(load)]
    found = next((reason for one in asked if (reason := one.problem(load)) is not None), None)
    most = max((one.rank for one in asked), default=0)
    special = [one.name for one in asked if one.rank == most]
    if found is None and len(special) > 1:
        return f"the settings of load ask for the patterns {' and '.join(special)}: give those of one"
    return found


def unused_settings(load: Any) -> list[str]:
    """Settings that are left out of the key of a load: those of patterns that are not in force, but for the patterns
    whose settings were in every key from the beginning."""
    pattern = chosen(load)
    others = [one for one in PATTERNS.values() if one is not pattern and not one.in_every_key]
    return [item.name for one in others for item in fields(one.settings)]


def columns(load: Any) -> dict[str, Any]:
    """`COLUMNS` of a load test, the front end apart; those that its pattern does not have are None."""
    pattern = chosen(load)
    assert pattern is not None
    return dict.fromkeys(name for name in COLUMNS if name != FRONTEND) | pattern.values(load)


def pattern_of(row: Any) -> LoadPattern | None:
    """The pattern of a row, by its columns; None for one of no load test, or of a pattern that is not installed."""
    if row.arrivals is None:
        return None
    return max((one for one in PATTERNS.values() if one.matches(row)), key=lambda one: one.rank, default=None)


def label(row: Any) -> str:
    """How much a row's load test asked, in words, and of which front end."""
    pattern = pattern_of(row)
    said = row.arrivals if pattern is None else pattern.label(row)
    return said + (f", front end in {row.frontend.capitalize()}" if row.frontend else "")


def comparable(row: Any, *, without: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """What two loads must agree in to be compared. row: has `COLUMNS`, as attributes or as a mapping. without: columns
    that an axis of a figure shows. A rate that follows from a share of the baseline's saturation is not looked at."""
    get = row.get if isinstance(row, Mapping) else lambda name: getattr(row, name)
    drawn = {*without, *(["rate"] if get("load_share") is not None else [])}
    return tuple(get(name) for name in COLUMNS if name not in drawn)
