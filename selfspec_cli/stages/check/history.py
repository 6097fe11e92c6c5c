"""Verdicts of performance checks, run after run: lines of JSON in a results folder, which are only ever added to."""

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.record import archive
from selfspec_cli.record.folder import explained

FILE = "checks.jsonl"


@cache
def code() -> str:
    """A digest of all that is installed of selfspec: another one, another code."""
    root, made = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        made.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return made.hexdigest()[:12]


def place(device: str) -> dict[str, Any]:
    """Code, machine and versions, which have to be the same for two verdicts to say something of each other."""
    versions = {name: version for name, version in machine.versions().items() if name in machine.DECISIVE}
    return {"code": code(), "device": device, "cpu": machine.cpu(), "versions": versions}


def add(results: str | os.PathLike[str], line: dict[str, Any]) -> Path:
    """Add a line, whole or not at all.

    Raises:
        RecordError: it could not be written.
    """
    archive.refuse(results)
    path = Path(results) / FILE
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one write of a line, which appends are atomic for
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return path


def read(results: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of a folder, the oldest first; a torn one is left out."""
    found = []
    with suppress(OSError):
        for line in archive.read_text(Path(results) / FILE).splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "outcome" in line]
