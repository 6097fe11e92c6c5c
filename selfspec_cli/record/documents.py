"""Documents of a results folder, such as findings and profiles: each is a dataclass and a JSON file of its own. Rows of
one kind are two files: NAME.csv to look at, NAME.json with the facts that hold for all of them."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from selfspec_cli.record import archive
from selfspec_cli.whole import written

FORMAT = 1
T = TypeVar("T")


def save(file: Path, document: Any) -> Path:
    """Write a dataclass, whole or not at all; raises OSError."""
    with written(file) as part:
        text = json.dumps({"format": FORMAT} | asdict(document), ensure_ascii=False)
        part.write_text(text + "\n", encoding="utf-8")
    return file


def plain(folder: Path) -> list[dict[str, Any]]:
    """The JSON objects of a folder, or of one in an archive, the oldest first. Other files are left alone."""
    found = []
    for file in archive.files(folder, "[!.]*.json"):
        with suppress(ValueError, OSError):
            data = json.loads(archive.read_text(file))
            if isinstance(data, dict):
                found.append(((str(data.get("time")), file.stem.partition("-")[2]), data))
    return [data for _, data in sorted(found, key=lambda pair: pair[0])]


def read(folder: Path, kind: type[T]) -> Iterator[T]:
    """Yield what `save` wrote, the oldest first. Entries that `kind` has no field for are read away."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for data in plain(folder):
        with suppress(TypeError):
            if data.get("format") == FORMAT:
                yield kind(**{name: value for name, value in data.items() if name in names})


def save_rows(name: str, kind: type[Any], rows: Sequence[Any], facts: dict[str, Any], folder: Path) -> dict[str, str]:
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
