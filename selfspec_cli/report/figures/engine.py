"""Figures of the engine: speedup by load, the cost model, energy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from selfspec_cli import load_patterns
from selfspec_cli.record.columns import Record
from selfspec_cli.report.figures.base import (
    COLOURS,
    LONGEST,
    SLOWER,
    STEP,
    Figure,
    Panel,
    figure,
    kind_colour,
    labels,
    look,
    measured,
    names_above,
    rows_chart,
    series_colour,
    short,
    sig,
    times_axis,
)
from selfspec_cli.report.rows import Group, acceptance, label

LOADS = {"batch": "requests in flight (batch)", "clients": "clients", "rate": "requests that arrive in a second"}
"""Columns that say how much is asked of the engine at once; those that a record has are drawn."""


def by_load(groups: Sequence[Group], column: str) -> list[Figure]:
    """Speedup and throughput as more is asked of the engine at once; what lies below 1x is marked as a loss."""
    families: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for group in groups:
        for row in measured(group):
            if getattr(row, column, None) is not None:
                families[_family(row, column)].append(row)
    panels = []
    for (model, device, *_), rows in families.items():
        arms = [row for row in rows if row.arm != "baseline"]
        if len({getattr(row, column) for row in arms}) < 2:
            continue
        first = arms[0]
        title = f"{model}, {first.input_len} tokens in, {first.output_len} out"
        accepted = acceptance(first)
        panels.append(
            Panel(
                device or "machine unknown",
                ", ".join(filter(None, (title, accepted))),
                _speedups_by(column, arms),
                tuple(row.point for row in rows),
            )
        )
    x = alt.X("load:O", axis=alt.Axis(title=LOADS[column], labelAngle=0))
    y = alt.Y("speedup:Q", axis=times_axis("speedup"), scale=alt.Scale(zero=False, nice=True))
    tips = ["series:N", "load:O", "speedup:Q", "low:Q", "high:Q", "tok_s:Q", "point:N"]
    middle = alt.Y("median(speedup):Q", axis=times_axis("speedup"), scale=alt.Scale(zero=False, nice=True))
    line = rows_chart().mark_line(strokeWidth=2).encode(x=x, y=middle, color=series_colour())
    dots = (
        rows_chart()
        .mark_point(filled=True, size=70, opacity=1)
        .encode(
            x=x,
            y=y,
            tooltip=tips,
            color=alt.condition("datum.loss", alt.value(COLOURS[SLOWER]), series_colour()),
        )
    )
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(y="one:Q")
    chart = (one + line + dots).properties(width="container", height=300)
    about = (
        "The speedup of each arm over the baseline of the same load; where several runs measured it, the line goes "
        "through their median. Red points below 1x are losses."
    )
    return figure(f"by_{column}", f"Speedup by {LOADS[column]}", about, chart, panels)


def _speedups_by(column: str, arms: Iterable[Record]) -> list[dict[str, Any]]:
    """The points of a panel, in the order of their labels and loads."""
    named = [(label(replace(row, acceptance_length=None)), row) for row in arms]
    return [
        {
            "series": name,
            "load": getattr(row, column),
            "speedup": sig(row.speedup),
            "low": sig(row.speedup_low),
            "high": sig(row.speedup_high),
            "tok_s": sig(row.tok_s_median),
            "loss": (row.speedup or 1) < 1,
            "point": row.point,
        }
        for name, row in sorted(named, key=lambda pair: (pair[0], getattr(pair[1], column)))
    ]


def _family(row: Record, column: str) -> tuple[Any, ...]:
    """What rows have in common that differ in their load alone."""
    names = ("model", "device", "workload", "input_len", "output_len", "temperature", "acceptance_length")
    axis = ("rate", "load_share") if column == "rate" else (column,)
    load = load_patterns.comparable(row, without=axis)
    return (*(getattr(row, name) for name in names), load, row.batch if column != "batch" else None)


def cost_model(groups: Iterable[Group]) -> list[Figure]:
    """What was measured beside what the cost model predicts for the accepted length that was measured."""
    data: dict[str, list[dict[str, Any]]] = defaultdict(list)
    points: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for row in measured(group):
            if row.predicted is not None:
                data[short(row)].append(
                    {
                        "arm": label(row),
                        "where": group.title,
                        **look(row),
                        "predicted": sig(row.predicted),
                        "speedup": sig(row.speedup),
                        "efficiency": sig(row.efficiency, 3),
                        "point": row.point,
                    }
                )
                points[short(row)].append(row.point)
    panels = [Panel("", device, found, tuple(points[device])) for device, found in data.items()]
    tips = ["arm:N", "where:N", "predicted:Q", "speedup:Q", "efficiency:Q", "point:N"]
    dots = (
        rows_chart()
        .mark_circle(size=70, opacity=0.85)
        .encode(
            x=alt.X("predicted:Q", axis=times_axis("predicted by the cost model"), scale=alt.Scale(zero=False)),
            y=alt.Y("speedup:Q", axis=times_axis("measured"), scale=alt.Scale(zero=False)),
            color=kind_colour(),
            tooltip=tips,
        )
    )
    equal = (
        rows_chart()
        .mark_line(strokeDash=[4, 3], strokeWidth=1, color="#84909c")
        .encode(x="predicted:Q", y="predicted:Q")
    )
    chart = (equal + dots).properties(width="container", height=320)
    about = (
        "The cost model counts the bytes that a round reads, so it bounds what memory allows. On the dashed line a "
        "measurement is as fast as predicted; below it the engine, or a batch that computes more than it reads, loses "
        "time."
    )
    return figure("cost_model", "Measured against the cost model", about, chart, panels)


def energy(groups: Iterable[Group]) -> list[Figure]:
    """Joules for each generated token: mean board power over tokens a second."""
    panels = []
    for group in groups:
        rows = [row for row in measured(group)[:LONGEST] if row.power_w is not None and row.tok_s_median]
        data = [
            {
                "arm": name,
                **look(row),
                "joules": sig((row.power_w or 0) / (row.tok_s_median or 1)),
                "power_w": sig(row.power_w),
                "text": f"{(row.power_w or 0) / (row.tok_s_median or 1):.2f} J, {row.power_w:.0f} W",
                "sm": sig(row.sm_util, 3),
                "dram": sig(row.dram_util, 3),
                "point": row.point,
            }
            for name, row in zip(labels(rows), rows, strict=True)
        ]
        if rows:
            panels.append(Panel(short(rows[0]), group.title, data, tuple(row.point for row in rows)))
    y = alt.Y("arm:N", sort=None, axis=None)
    bars = (
        rows_chart()
        .mark_bar(size=13, yOffset=4)
        .encode(
            x=alt.X("joules:Q", axis=alt.Axis(title="joules a generated token", tickCount=6)),
            y=y,
            color=kind_colour(),
            tooltip=["arm:N", "joules:Q", "power_w:Q", "sm:Q", "dram:Q", "point:N"],
        )
    )
    number = (
        rows_chart().mark_text(align="right", baseline="bottom", dy=-8).encode(x=alt.value("width"), y=y, text="text:N")
    )
    chart = (bars + names_above() + number).properties(width="container", height=alt.Step(STEP))
    about = "Mean board power while the repeats ran (NVML), over the tokens that were generated in that time."
    return figure("energy", "Power, and joules a token", about, chart, panels)
