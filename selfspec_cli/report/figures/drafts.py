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
BOTH = {
    "speedup": {"value": "speedup", "low": "speedup_low", "high": "speedup_high"},
    "accepted": {"value": "accept_rate"},
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
            data = [
                {"series": name, "x": getattr(row, column), "what": what} | base.numbers(row, **values)
                for name, row in members
                for what, values in BOTH.items()
                if getattr(row, values["value"]) is not None
            ]
            where, what = f"{group.title}, {base.short(members[0][1])}", f"gate {gate}" if gate else "all arms"
            panels.append(base.of_rows(where, what, data, [row for _, row in members]))
    whole = {"labelExpr": "datum.value % 1 ? '' : datum.label", "format": "d"} if column == "k" else {}
    scale = alt.Scale(zero=False, nice=False, padding=12)
    x = alt.X("x:Q", axis=alt.Axis(title=axis, tickCount=6, **whole), scale=scale)
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


def positions(groups: Iterable[Group], accepts: Sequence[AcceptRow | None]) -> list[Figure]:
    """The share of rounds in which the draft at each position was accepted."""
    counted = {row.point: (row.rounds, row.accepted_at) for row in accepts if row and row.accepted_at and row.rounds}
    panels = []
    for group in groups:
        rows = [row for row in base.measured(group) if row.point in counted and row.acceptance_length is None][:20]
        data = []
        for name, row in base.named(rows):
            rounds, accepted_at = counted[row.point]
            for place, count in enumerate(accepted_at.split(), start=1):
                share = base.sig(int(count) / rounds, 4)
                data.append({"series": name, "position": place, "share": share, "point": row.point})
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
