"""What stands in the cells of generated tables, and where the published files are."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from selfspec_cli.record import archive, folder
from selfspec_cli.record.point import Point

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns that no row fills are left out, None is an empty cell."""
    lines = [["" if cell is None else str(cell).replace("|", "\\|") for cell in row] for row in rows]
    kept = [place for place in range(len(header)) if any(line[place] for line in lines)]
    shown = [[line[place] for place in kept] for line in [list(header), ["---"] * len(header), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def number(value: Any, digits: int = 3, unit: str = "") -> str | None:
    """A figure of a file, rounded: thousands with commas; None where there is none."""
    if value in (None, ""):
        return None
    size = float(value)
    return (f"{size:,.0f}" if abs(size) >= 1000 else f"{size:.{digits}g}") + unit


def ratio(value: Any) -> str | None:
    """A speedup, such as 1.64x."""
    return None if value in (None, "") else f"{float(value):.2f}x"


def percent(value: Any) -> str | None:
    """A share, such as 63 %."""
    return None if value in (None, "") else f"{100 * float(value):.0f} %"


def at(name: str) -> Path:
    """Where a published file or folder is, such as `gpu/lowbit/int4_E8`: in an archive, or beside them."""
    if (PUBLISHED / name).is_file():
        return PUBLISHED / name
    parts = name.split("/")
    for last in range(len(parts), 0, -1):
        packed = PUBLISHED.joinpath(*parts[:last]).with_name(parts[last - 1] + archive.SUFFIX)
        if packed.is_file():
            return packed.joinpath(*parts[last:])
    return PUBLISHED / name


@lru_cache(maxsize=64)
def points_of(name: str) -> tuple[Point, ...]:
    """The points of a published folder."""
    points, warnings = folder.read(at(name))
    assert not warnings, warnings
    return tuple(points)


def text_of(name: str) -> str:
    """A text file of results/published."""
    return archive.read_text(at(name))


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of results/published."""
    return list(csv.DictReader(text_of(name).splitlines()))


def data_of(name: str) -> Any:
    """A JSON file of results/published."""
    return json.loads(text_of(name))
