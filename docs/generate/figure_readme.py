"""Tables of speedups: a row is one setting, a cell the published point with its key."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figure_cells import at, points_of, ratio, table

from selfspec_cli.record import folder, tables
from selfspec_cli.record.columns import AcceptRow, Record
from selfspec_cli.record.point import OK, Point
from selfspec_cli.report.rows import Group, groups, headline, label, times
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


# ---- Tables of vLLM's other methods, from the points of results folders: every measured setting of every method


COLUMNS = (
    "method and setting",
    "speedup",
    "accept rate",
    "tokens a verify step",
    "rounds that accept 1, 2, 3, ... drafts",
    "identical outputs",
)
TEXTS = {"headline": "Python", "prose": "English documentation", "chat": "chat questions"}
"""The prompts of a workload in words."""
POSITIONS = 5  # of acceptance by position; the later ones are in accept.tsv


def rivals_tables(place: Path) -> str:
    """Return the tables of every results folder in a folder."""
    result_folders = results_folders(place)
    if not result_folders:
        return "Nothing has been measured on a quiet machine yet."
    return "\n".join(line for each in result_folders for line in markdown(each)).strip()


def lost(place: Path) -> Iterator[str]:
    """List settings of other methods that were faster than every setting of early exit, by model, text and load.

    Faster means that the whole interval is above early exit's intervals.
    """
    for results in results_folders(place):
        points = [point for point in folder.read(results)[0] if point.ok]
        for group in groups(tables.row(point) for point in points):
            measured = arms(group.rows)
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


def markdown(place: Path) -> Iterator[str]:
    """Yield the lines of all tables of a results folder."""
    points = [point for point in folder.read(place)[0] if point.ok]
    if not points:
        raise SystemExit(
            f"{place}: it holds no measured point; measure with: selfspec sweep experiment=rivals results_dir={place}"
        )
    accepted = {point.id: tables.accept_row(point) for point in points}
    for group in groups(tables.row(point) for point in points):
        if len(group.rows) > 1:
            yield from _table(group, accepted, place)


def _table(group: Group, accepted: dict[str, AcceptRow | None], place: Path) -> Iterator[str]:
    first = group.rows[0]
    text = f", {TEXTS[first.workload]}" if first.workload in TEXTS else ""
    yield f"**{group.title}**{text} ({first.device}; `{place.name}`). {headline(group.rows)}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in arms(group.rows):
        rate = "" if row.accept_rate is None else f"{row.accept_rate:.0%}"
        length = "" if row.mean_accepted_len is None else f"{row.mean_accepted_len:.2f}"
        same = "" if row.identical is None else f"{row.identical} of {row.outputs}"
        yield f"| {label(row)} | {times(row)} | {rate} | {length} | {_positions(accepted.get(row.point))} | {same} |"
    yield ""


def arms(rows: Sequence[Record]) -> list[Record]:
    """Return the measured arms without the baseline, the fastest first."""
    kept = [row for row in rows if row.arm != "baseline" and row.status == OK and row.speedup is not None]
    return sorted(kept, key=lambda row: -(row.speedup or 0))


def _positions(row: AcceptRow | None) -> str:
    """Return which shares of the steps with drafts accepted at least 1, 2, 3, ... of them."""
    if row is None or not row.rounds or not row.accepted_at:
        return ""
    shares = [f"{int(count) / row.rounds:.0%}" for count in row.accepted_at.split()]
    return ", ".join(shares[:POSITIONS]) + (", ..." if len(shares) > POSITIONS else "")
