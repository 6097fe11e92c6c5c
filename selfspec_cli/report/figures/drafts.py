"""Figures of drafting: thresholds, draft lengths, acceptance by position, and the ROC of gates."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.record.columns import AcceptRow, Record
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure, Panel
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
        for row in base.measured(group):
            if row.arm != "baseline" and getattr(row, column) is not None:
                without: dict[str, Any] = {column: None}
                series[label(replace(row, **without)).replace("k=None ", "")].append(row)
        by_gate: dict[str, list[tuple[str, Record]]] = defaultdict(list)
        for name, rows in series.items():
            if len({getattr(row, column) for row in rows}) > 1:
                for row in sorted(rows, key=lambda row: getattr(row, column)):
                    by_gate[(row.gate or "") if column == "threshold" else ""].append((name, row))
        for gate, members in by_gate.items():
            data = [point for name, row in members for point in _both(name, row, getattr(row, column))]
            where = f"{group.title}, {base.short(members[0][1])}"
            panels.append(
                base.of_rows(where, f"gate {gate}" if gate else "all arms", data, [row for _, row in members])
            )
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label", "format": "d"} if column == "k" else {}
    x = alt.X(
        "x:Q",
        axis=alt.Axis(title=axis, tickCount=6, **whole),
        scale=alt.Scale(zero=False, nice=False, padding=12),
    )
    tips = ["series:N", "x:Q", "value:Q", "low:Q", "high:Q", "point:N"]

    def part(what: str, axis_: Any) -> Any:
        each = base.rows_chart().transform_filter(f"datum.what == '{what}'")
        each = each.encode(x=x, color=base.colour("series"), tooltip=tips)
        whisker = each.transform_filter("isValid(datum.low)").mark_rule().encode(y="low:Q", y2="high:Q")
        line = each.mark_line(point=alt.OverlayMarkDef(size=60), strokeWidth=2)
        line = line.encode(y=alt.Y("value:Q", axis=axis_, scale=alt.Scale(zero=False)))
        return (whisker + line).properties(width="container", height=200)

    chart = alt.vconcat(
        part("speedup", base.times_axis("speedup")),
        part("accepted", alt.Axis(title="drafts accepted", format="%", tickCount=5)),
    )
    return base.figure(f"by_{column}", title, about, chart, panels)


def _both(name: str, row: Record, x: float) -> list[dict[str, Any]]:
    """The dots of one row: its speedup, and its acceptance where it is known."""
    dot = {"series": name, "x": x}
    speed = dot | {"what": "speedup"} | base.numbers(row, value="speedup", low="speedup_low", high="speedup_high")
    accepted = dot | {"what": "accepted"} | base.numbers(row, value="accept_rate")
    return [speed] if row.accept_rate is None else [speed, accepted]


def positions(groups: Iterable[Group], accepts: Sequence[AcceptRow | None]) -> list[Figure]:
    """The share of rounds in which the draft at each position was accepted."""
    counted = {row.point: row for row in accepts if row is not None and row.accepted_at and row.rounds}
    panels = []
    for group in groups:
        rows = [row for row in base.measured(group) if row.point in counted and row.acceptance_length is None][:20]
        data = [
            {
                "series": name,
                "position": place,
                "share": base.sig(int(count) / (counted[row.point].rounds or 1), 4),
                "point": row.point,
            }
            for name, row in base.named(rows)
            for place, count in enumerate((counted[row.point].accepted_at or "").split(), start=1)
        ]
        panels += base.on_machine(group, data, rows)
    share = alt.Axis(title="rounds in which it was accepted", format="%")
    line = base.rows_chart().mark_line(point=alt.OverlayMarkDef(size=60), strokeWidth=2)
    chart = line.encode(
        x=alt.X("position:O", axis=alt.Axis(title="position in the draft", labelAngle=0)),
        y=alt.Y("share:Q", axis=share, scale=alt.Scale(zero=True)),
        color=base.colour("series"),
        tooltip=["series:N", "position:O", "share:Q", "point:N"],
    ).properties(width="container", height=260)
    about = (
        "Of all rounds that drafted: in how many the draft at this position was accepted. It falls because a draft "
        "stands only if all before it do, and because a gate may end the draft before."
    )
    return base.figure("positions", "Acceptance by position", about, chart, panels)


def roc(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Figure]:
    """ROC curves of the gates, as `selfspec roc` left them in a folder: a panel an exit."""
    panels = []
    for folder, exits in curves.items():
        for exit_ in exits:
            data = [
                {"gate": f"{curve['gate']} {curve['auc']:.2f}", "gate_name": curve["gate"]}
                | {"false": base.sig(x, 4), "true": base.sig(y, 4)}
                for curve in exit_["curves"]
                for x, y in zip(curve["false"], curve["true"], strict=True)
            ]
            panels.append(Panel(folder, f"{exit_['title']}: {exit_['of']}", data))
    gates = [gate for gate in GATES if gate != "none"]
    scale = alt.Scale(domain=gates, range=[GATES[gate].colour for gate in gates])
    by_gate = alt.Color("gate_name:N", scale=scale, legend=None)
    x = alt.X("false:Q", axis=alt.Axis(title="rejected drafts that pass the gate", format="%", tickCount=5))
    y = alt.Y("true:Q", axis=alt.Axis(title="accepted drafts that pass the gate", format="%", tickCount=5))
    tips = ["gate:N", "false:Q", "true:Q"]
    line = base.rows_chart().mark_line(strokeWidth=2)
    line = line.encode(x=x, y=y, color=by_gate, order="false:Q", detail="gate:N", tooltip=tips)
    chance = alt.Chart(alt.Data(values=[{"at": 0}, {"at": 1}])).mark_line(strokeDash=[4, 3], color=base.PLAIN)
    chance = chance.encode(x="at:Q", y="at:Q")
    key = base.rows_chart().transform_aggregate(groupby=["gate", "gate_name"]).transform_window(place="row_number()")
    key = key.mark_text(align="right", fontSize=12)
    key = key.encode(x=alt.value("width"), y=alt.Y("place:O", axis=None), text="gate:N", color=by_gate)
    chart = alt.vconcat(
        (chance + line).properties(width="container", height=320),
        key.properties(width="container", height=alt.Step(18)),
    )
    about = (
        "How well each gate tells drafts that will stand from those that will not. The number beside a gate is the "
        "area under its curve: 1 for a perfect gate, 0.5 for one that tells nothing."
    )
    return base.figure("roc", "ROC of the gates", about, chart, panels)
