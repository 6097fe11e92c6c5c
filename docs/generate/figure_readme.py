"""Tables of speedups: a row is one setting, a cell the published point with its key."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figure_cells import at, points_of, ratio, table

from selfspec_cli.record import folder, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import groups, label
from selfspec_cli.report.sources import folders as results_folders

LOADS = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class Line:
    """One setting on one model and machine.

    runs: folders of points that measured it; the median of several is shown. keys: the key of its point by number of
    requests.
    """

    model: str
    setting: str
    runs: tuple[str, ...]
    keys: dict[int, str]


def _lines() -> Iterator[Line | str]:
    """Yield the lines of settings.tsv: model, what drafts, folders, keys by number of requests; or a heading alone."""
    for text in Path(__file__).with_name("settings.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        heading, *rest = text.split("\t")
        if not rest:
            yield heading
            continue
        setting, runs, keys = rest
        by_load = dict(key.split(":") for key in keys.split())
        yield Line(heading, setting, tuple(runs.split()), {int(load): key for load, key in by_load.items()})


def rivals() -> str:
    """List where another method of vLLM was faster than every measured setting of self-speculation."""
    return "\n".join(f"- {line}" for line in lost(at("rivals")))


def settings() -> str:
    """Write a row per setting, with a column per number of requests."""
    rows = [
        (line, *[""] * (len(LOADS) + 1)) if isinstance(line, str) else (line.model, line.setting, *_cells(line))
        for line in _lines()
    ]
    return table(("model, machine", "what drafts", "1 request at once", *map(str, LOADS[1:])), rows)


def _cells(line: Line) -> list[str]:
    """Return the speedups of a line by LOADS; a median is followed by the number of its runs.

    Raises:
        ValueError: a key names no point or a point of another load, or the points have several settings.
    """
    cells, setting = [], None
    for load in LOADS:
        points = [point for name in line.runs for point in points_of(name) if point.key == line.keys.get(load)]
        if not points and load in line.keys:
            raise ValueError(f"{line.setting}: no point of {', '.join(line.runs)} has the key {line.keys[load]}")
        for point in points:
            setting = setting or one_setting(point)
            if point.arm["batch"] != load or one_setting(point) != setting:
                raise ValueError(f"{line.setting}: {point.id} is of another load or setting than its row")
        values = [point.compared_with.speedup for point in points if point.compared_with is not None]
        runs = f" ({len(values)} runs)" if len(values) > 1 else ""
        cells.append(f"{ratio(statistics.median(values))}{runs}" if values else "")
    return cells


def one_setting(point: Point) -> dict[str, Any]:
    """Return a point's setting without the load and the length of the measurement."""
    return {
        name: value
        for name, value in point.arm.items()
        if name not in ("batch", "repeats", "seed", "output_len") and value is not None
    }


# ---- Where another method of vLLM was faster


TEXTS = {"headline": "Python", "prose": "English documentation", "chat": "chat questions"}
"""The prompts of a workload in words."""


def lost(place: Path) -> Iterator[str]:
    """List settings of other methods that were faster than every setting of early exit, by model, text and load.

    Faster means that the whole interval is above early exit's intervals.
    """
    for results in results_folders(place):
        points = [point for point in folder.read(results)[0] if point.ok]
        for group in groups(tables.row(point) for point in points):
            drafting = (row for row in group.rows if row.arm != "baseline" and row.speedup is not None)
            measured = sorted(drafting, key=lambda row: -row.speedup)
            ours = [row for row in measured if row.arm == "layer_skip"]
            above = [
                row
                for row in measured
                if ours and row not in ours and (row.speedup_low or row.speedup or 0) > max(_high(own) for own in ours)
            ]
            if not above:
                continue
            first = group.rows[0]
            text = TEXTS.get(first.workload or "", "random text")
            others = " and ".join(f"{_method(row)} {row.speedup:.2f}x" for row in above)
            own = " and ".join(f"{_method(row)} {row.speedup:.2f}x" for row in ours)
            where = f"{first.model}, {text}, {first.input_len:,} tokens in, batch {first.batch}, {first.device}"
            yield f"{others}, where early exit was {own} ({where})"


def _method(row: Record) -> str:
    """Return a setting in two or three words."""
    if row.arm == "layer_skip":
        return label(replace(row, acceptance_length=None)).replace(" · lens", "").replace(" · no gate", "")
    return f"{(row.speculative or row.arm).partition(' ')[0]} k={row.k}"


def _high(row: Record) -> float:
    return row.speedup_high or row.speedup or 0.0
