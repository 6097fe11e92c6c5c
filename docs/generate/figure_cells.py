"""What stands in the cells of generated tables, and where the published files are."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of results/published."""
    with (PUBLISHED / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def data_of(name: str) -> Any:
    """A JSON file of results/published."""
    return json.loads((PUBLISHED / name).read_text(encoding="utf-8"))
