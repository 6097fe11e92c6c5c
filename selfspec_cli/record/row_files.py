"""Rows of one kind as two files: NAME.csv to look at, NAME.json with the facts that hold for all of them."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def save(name: str, kind: type[Any], rows: Sequence[Any], facts: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write `folder`/`name`.csv and .json; returns "csv" and "json" -> path. kind: the dataclass of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    table, document = folder / f"{name}.csv", folder / f"{name}.json"
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in fields(kind)])
        for row in rows:
            writer.writerow([_cell(getattr(row, column.name)) for column in fields(kind)])
    document.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    return {"csv": str(table), "json": str(document)}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
