"""Tables of speedups: a row is one setting, a cell the published point with its key."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure_cells import at, data_of, points_of, ratio, table
from figure_rivals import lost

from selfspec_cli.record.point import Point

LOADS = (1, 4, 8, 16, 32, 128)
SERVED = (
    "load_h200",
    "load_h200_swapped",
    "load_h200_alone",
    "load_h200_late",
    "load_h200_again",
    "load_h200_full_graphs",
    "load_h200_128",
    "load_h200_rust",
    "load_h200_rust_measured",
    "load_h200_rust_long",
    "load_h200_python_long",
    "load_h200_trimmed",
    "load_h200_two_api_servers",
)
"""Runs of experiments/serving/load_on_gpu.py on the widened reference model, in their order."""
RUNS = {
    "load_h200_rust_long": "table of lengths, behind vLLM's front end in Rust (run 10)",
    "load_h200_full_graphs": "table of lengths, behind vLLM's API server in Python (run 6, a slow host)",
}
"""Load runs that have a row of their own, each on one server with one setting."""


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


def served() -> str:
    """Write throughputs of a server over plain vLLM's in closed loops: two runs, and the range of all."""
    runs = {name: data_of(f"serving/{name}.json") for name in SERVED}
    levels = [level for level in runs[SERVED[0]]["compared"] if level.startswith("closed ")]
    clients = sorted(int(level.removeprefix("closed ")) for level in levels)
    rows = [
        (about, *(ratio(_reached(runs[name], f"closed {count}")) for count in clients)) for name, about in RUNS.items()
    ]
    reached = [[one for run in runs.values() if (one := _reached(run, f"closed {count}"))] for count in clients]
    rows.append(
        (
            f"all {len(runs)} runs, other hosts and versions: the lowest and the highest",
            *(f"{ratio(min(ratios))} to {ratio(max(ratios))}" for ratios in reached),
        )
    )
    text = """Served over HTTP on H200s, the widened model on 8-bit integers, 128 tokens out, clients that ask again at once:

"""
    return text + table(("clients", *map(str, clients)), rows)


def _reached(run: dict[str, Any], level: str) -> float | None:
    """Return throughput over plain vLLM's; the median of several turns."""
    turns, once = run.get("over_turns", {}).get(level), run["compared"].get(level)
    if turns:
        return float(turns["throughput"]["median"])
    return float(once["throughput"]) if once else None
