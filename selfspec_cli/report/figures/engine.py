"""Figures of the engine: the cost model, and energy."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import altair as alt

from selfspec_cli.report.figures.base import (
    LONGEST,
    Figure,
    Panel,
    bars,
    by_arm,
    colour,
    figure,
    labels,
    measured,
    on_machine,
    rows_chart,
    short,
    sig,
    times_axis,
)
from selfspec_cli.report.rows import Group, label


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
            color=colour("arm"),
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
                "joules": sig((row.power_w or 0) / (row.tok_s_median or 1)),
                "power_w": sig(row.power_w),
                "text": f"{(row.power_w or 0) / (row.tok_s_median or 1):.2f} J, {row.power_w:.0f} W",
                "sm": sig(row.sm_util, 3),
                "point": row.point,
            }
            for name, row in zip(labels(rows), rows, strict=True)
        ]
        panels += on_machine(group, data, rows)
    x = alt.X("joules:Q", axis=alt.Axis(title="joules a generated token", tickCount=6))
    tips = ["arm:N", "joules:Q", "power_w:Q", "sm:Q", "point:N"]
    chart = by_arm(bars(x, tips, color=colour("arm", legend=False)))
    about = "Mean board power while the repeats ran (NVML), over the tokens that were generated in that time."
    return figure("energy", "Power, and joules a token", about, chart, panels)
