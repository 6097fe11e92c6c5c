"""The figure by category of prompts: speedup and acceptance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record import categories as by_category
from selfspec_cli.record.point import Point
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.rows import Group

NUMBERS = ("speedup", "low", "high", "accepted", "tok_step", "requests", "tpot_ms")


def categories(groups: Iterable[Group], points: Sequence[Point]) -> list[Figure]:
    """Speedup, with its interval, and acceptance of each category of prompts: a dot an arm."""
    by_point: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in by_category.rows(points):
        if line["speedup"] is not None:
            values = line | {"accepted": next(iter(line["accepted"]), None)}  # of the first draft of a step
            numbers = {name: base.sig(values[name]) for name in NUMBERS}
            by_point[line["point"]].append({"category": line["category"], "point": line["point"]} | numbers)
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.point in by_point]
        named = zip(base.labels(rows), rows, strict=True)
        data = [{"series": name} | line for name, row in named for line in by_point[row.point]]
        panels += base.on_machine(group, data, rows)
    y = alt.Y(
        "category:N",
        sort=None,
        axis=alt.Axis(title=None, labelLimit=220),
        scale=alt.Scale(paddingInner=0.5, paddingOuter=0.25),
    )
    # Arms stand below each other in each category.
    below = alt.YOffset("series:N", sort=None, scale=alt.Scale(type="point", domain=[base.NAMES]))
    tips = ["series:N", "category:N", *(f"{name}:Q" for name in NUMBERS)]
    each = base.rows_chart().encode(y=y, yOffset=below, color=base.colour("series"), tooltip=tips)
    ends = each.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q")
    speedup = alt.X("speedup:Q", axis=base.times_axis("speedup"), scale=alt.Scale(zero=False))
    share = alt.Axis(title="steps that kept their first draft", format="%", tickCount=6)
    kept = base.dots(each, 60).transform_filter("isValid(datum.accepted)")
    parts = (
        base.unit_line(x="one:Q") + ends + base.dots(each, 60).encode(x=speedup),
        kept.encode(x=alt.X("accepted:Q", axis=share, scale=alt.Scale(domain=[0, 1]))),
    )
    chart = alt.vconcat(*(part.properties(width="container", height=alt.Step(base.STEP)) for part in parts))
    about = (
        "Above: tokens a second of a category's requests over the baseline's, with the 95 % interval. Below: the share "
        "of the steps in which the first draft was accepted. The file of prompts has the categories, and "
        "`selfspec report --by category` prints them."
    )
    return base.figure("categories", "Speedup and acceptance by category", about, chart, panels)
