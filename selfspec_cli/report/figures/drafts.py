"""Figures of drafting: thresholds, draft lengths, acceptance by position."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from selfspec_cli.record.columns import AcceptRow, Record
from selfspec_cli.report.figures.base import (
    Figure,
    colour,
    figure,
    labels,
    measured,
    of_rows,
    on_machine,
    rows_chart,
    short,
    sig,
    times_axis,
)
from selfspec_cli.report.rows import Group, label

VARIED = {
    "threshold": (
        "Gate threshold",
        "threshold",
        "What a gate's threshold does to acceptance and to speed, all else equal.",
    ),
    "k": (
        "Draft length",
        "draft tokens a round, at most (k)",
        "What the longest draft allowed does to acceptance and to speed, all else equal.",
    ),
}


def against(groups: Iterable[Group], column: str) -> list[Figure]:
    """Accept rate and speedup of arms that differ in one column alone: lines of at least two points."""
    title, axis, about = VARIED[column]
    panels = []
    for group in groups:
        series: dict[str, list[Record]] = defaultdict(list)
        for row in measured(group):
            if row.arm != "baseline" and getattr(row, column) is not None:
                without: dict[str, Any] = {column: None}
                series[label(replace(row, **without)).replace("k=None ", "")].append(row)
        lines = {name: rows for name, rows in series.items() if len({getattr(row, column) for row in rows}) > 1}
        by_gate: dict[str, list[tuple[str, Record]]] = defaultdict(list)
        for name, rows in lines.items():
            for row in sorted(rows, key=lambda row: getattr(row, column)):
                by_gate[(row.gate or "") if column == "threshold" else ""].append((name, row))
        for gate, members in by_gate.items():
            data = [point for name, row in members for point in _both(name, row, getattr(row, column))]
            where = f"{group.title}, {short(members[0][1])}"
            panels.append(of_rows(where, f"gate {gate}" if gate else "all arms", data, [row for _, row in members]))
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label", "format": "d"} if column == "k" else {}
    x = alt.X(
        "x:Q",
        axis=alt.Axis(title=axis, tickCount=6, **whole),
        scale=alt.Scale(zero=False, nice=False, padding=12),
    )
    tips = ["series:N", "x:Q", "value:Q", "low:Q", "high:Q", "point:N"]

    def part(what: str, axis_: Any) -> Any:
        base = (
            rows_chart().transform_filter(f"datum.what == '{what}'").encode(x=x, color=colour("series"), tooltip=tips)
        )
        whisker = base.transform_filter("isValid(datum.low)").mark_rule().encode(y="low:Q", y2="high:Q")
        line = base.mark_line(point=alt.OverlayMarkDef(size=60), strokeWidth=2)
        line = line.encode(y=alt.Y("value:Q", axis=axis_, scale=alt.Scale(zero=False)))
        return (whisker + line).properties(width="container", height=200)

    chart = alt.vconcat(
        part("speedup", times_axis("speedup")),
        part("accepted", alt.Axis(title="drafts accepted", format="%", tickCount=5)),
    )
    return figure(f"by_{column}", title, about, chart, panels)


def _both(name: str, row: Record, x: float) -> list[dict[str, Any]]:
    dot = {"series": name, "x": x, "point": row.point}
    speed = {"value": sig(row.speedup), "low": sig(row.speedup_low), "high": sig(row.speedup_high)}
    accepted = [] if row.accept_rate is None else [dot | {"what": "accepted", "value": sig(row.accept_rate)}]
    return [dot | {"what": "speedup"} | speed, *accepted]


def positions(groups: Iterable[Group], accepts: Sequence[AcceptRow | None]) -> list[Figure]:
    """The share of rounds in which the draft at each position was accepted."""
    counted = {row.point: row for row in accepts if row is not None and row.accepted_at and row.rounds}
    panels = []
    for group in groups:
        rows = [row for row in measured(group) if row.point in counted and row.acceptance_length is None][:20]
        data = [
            {
                "series": name,
                "position": place,
                "share": sig(int(count) / (counted[row.point].rounds or 1), 4),
                "point": row.point,
            }
            for name, row in zip(labels(rows), rows, strict=True)
            for place, count in enumerate((counted[row.point].accepted_at or "").split(), start=1)
        ]
        panels += on_machine(group, data, rows)
    chart = (
        rows_chart()
        .mark_line(point=alt.OverlayMarkDef(size=60), strokeWidth=2)
        .encode(
            x=alt.X("position:O", axis=alt.Axis(title="position in the draft", labelAngle=0)),
            y=alt.Y(
                "share:Q",
                axis=alt.Axis(title="rounds in which it was accepted", format="%"),
                scale=alt.Scale(zero=True),
            ),
            color=colour("series"),
            tooltip=["series:N", "position:O", "share:Q", "point:N"],
        )
        .properties(width="container", height=260)
    )
    about = (
        "Of all rounds that drafted: in how many the draft at this position was accepted. It falls because a draft "
        "stands only if all before it do, and because a gate may end the draft before."
    )
    return figure("positions", "Acceptance by position", about, chart, panels)
