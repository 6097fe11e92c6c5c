"""What the load of a row was, and what a search for the greatest one found, in words."""

from __future__ import annotations

from selfspec_cli import load_patterns
from selfspec_cli.record.columns import Record
from selfspec_cli.record.load_columns import FACT
from selfspec_cli.record.point import Point


def searched(point: Point, row: Record) -> str | None:
    """What a search found, in words: the greatest load that keeps the limits; None for a point of no search."""
    found = point.engine.get(FACT)
    if found is None:
        return None
    limits = ", ".join(found["limits"])
    if not found["kept"]:
        return f"no load that was tried keeps {limits} (the least: {asked(row)})"
    broken = found["broken_at"]
    next_load = "" if broken is None else f", and at {broken:.3g} no longer"
    unsure = "" if found["sure"] else "; too few requests to be sure of it"
    good = "" if row.goodput is None else f"; goodput {row.goodput:.3g} requests/s"
    return f"{asked(row)} keep {limits}{next_load}{unsure}{good}"


def asked(row: Record) -> str:
    """How much is asked of an engine at once, in words."""
    if row.arrivals is None:
        return f"batch {row.batch}"
    return load_patterns.label(row)
