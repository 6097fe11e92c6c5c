"""Published files that hold no points: the text of files.txt with its table blocks filled in.

A block in files.txt names files, the way to their rows, and columns:

    ```table
    files: serving/load_*.json          patterns of published files, separated by spaces
    rows: compared.*                    steps to the rows; * takes every value of a mapping, whose key becomes `name`
    where: position=1                   only rows with this value, or, without "=", only rows that have this entry
    columns: level=name; throughput x   title=path; a path may be divided by another one, and end in " x" or " %"
    ```

A row has the single values of what it lies in as well. With several files the first column is the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figure_cells import data_of, names, number, percent, ratio, rows_of, table

TEXT = Path(__file__).with_name("files.txt").read_text(encoding="utf-8")
BLOCK = re.compile(r"```table\n(.*?)```", re.DOTALL)
VALUE = re.compile(r"(.+?)(?: / (.+?))?( [x%])?")


def patterns() -> set[str]:
    """Return the patterns of all files that have a table, or that the text names."""
    return {word for block in BLOCK.findall(TEXT) for word in _settings(block)["files"].split()} | set(
        re.findall(r"`([\w.-]+/[\w./*-]+)`", TEXT)
    )


def sections() -> str:
    """Write the sections with their tables."""
    return BLOCK.sub(lambda block: _table(_settings(block[1])), TEXT)


def _settings(block: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in block.strip().splitlines())


def _table(about: dict[str, str]) -> str:
    files = [name for pattern in about["files"].split() for name in names(pattern)]
    if not files:
        raise ValueError(f"no published file is called {about['files']}")
    columns = [column.partition("=") for column in about["columns"].split("; ")]
    lines = []
    for name in files:
        steps = [step for step in about.get("rows", "").split(".") if step]
        for row in _rows(rows_of(name) if name.endswith(".csv") else data_of(name), steps, {}):
            if _wanted(row, about.get("where", "")):
                lines.append((f"`{name}`", *(_cell(row, path or title) for title, _, path in columns)))
    if not lines:
        raise ValueError(f"{about['files']} has no rows at {about.get('rows')}")
    shown = slice(0 if len(files) > 1 else 1, None)
    titles = ("file", *(re.sub(r" [x%]$", "", title) for title, _, _ in columns))
    return table(titles[shown], [line[shown] for line in lines])


def _rows(node: Any, steps: list[str], around: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows that `steps` lead to; around: the single values of what lies above them."""
    if isinstance(node, list):
        for entry in node:
            yield from _rows(entry, steps, around)
    elif not steps:
        yield around | node
    else:
        around = around | {key: value for key, value in node.items() if not isinstance(value, (dict, list))}
        entries = node.items() if steps[0] == "*" else [(None, node.get(steps[0], []))]
        for key, value in entries:
            if isinstance(value, (dict, list)):
                yield from _rows(value, steps[1:], around if key is None else around | {"name": key})


def _wanted(row: dict[str, Any], condition: str) -> bool:
    path, equals, value = condition.partition("=")
    return not condition or (str(row.get(path)) == value if equals else path in row)


def _cell(row: dict[str, Any], what: str) -> str | None:
    match = VALUE.fullmatch(what)
    assert match is not None
    value, divisor = _at(row, match[1]), _at(row, match[2]) if match[2] else 1
    if value in (None, "") or divisor in (None, ""):
        return None
    if match[2] or match[3]:
        show = {" x": ratio, " %": percent}.get(match[3] or "", lambda size: number(size, 4))
        return show(float(value) / float(divisor))
    return _shown(value)


def _at(row: dict[str, Any], path: str) -> Any:
    node: Any = row
    for step in path.split("."):
        node = node.get(step) if isinstance(node, dict) else None
    return node


def _shown(value: Any) -> str | None:
    if isinstance(value, list):
        return ", ".join(_shown(entry) or "" for entry in value) or "none"
    if isinstance(value, dict):
        return " ".join(_shown(entry) or "" for entry in value.values())
    return number(value, 4) if isinstance(value, float) else str(value)
