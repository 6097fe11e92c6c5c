"""Documents of a results folder, such as findings and profiles: each is a dataclass and a JSON file of its own."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from selfspec_cli.record import archive
from selfspec_cli.whole import atomic_write

FORMAT = 1
T = TypeVar("T")


def save(file: Path, document: Any) -> Path:
    """Write a dataclass, whole or not at all; raises OSError."""
    atomic_write(file, json.dumps({"format": FORMAT} | asdict(document), ensure_ascii=False) + "\n")
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
