"""Figures of drafts: thresholds, lengths, acceptance by position, ROC of gates, identical outputs, perplexities."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.record import tables
from selfspec_cli.record.columns import AcceptRow, Record
from selfspec_cli.record.point import OK, Point, control
from selfspec_cli.record.tables import asked
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
            where = f"{group.title}, {base.short(members[0][1])}"
            which = f"gate {gate}" if gate else "all arms"
            panels.append(base.of_rows(where, which, data, [row for _, row in members]))
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


PERPLEXITIES = {
    "delta_ppl": "ΔPPL of held-out text under the arm's own predictions",
    "delta_ppl_of_greedy": "ΔPPL of its greedy generations under the plain model",
    "delta_ppl_of_sampled": "ΔPPL of its sampled generations under the plain model",
    "ppl": "perplexity of held-out text under the arm's own predictions",
}
SEEN = 0.005  # a difference in perplexity below this is rounding


def perplexities(groups: Iterable[Group]) -> list[Figure]:
    """A dot an arm, with the interval over documents or prompts, where two arms or more have one and they differ."""
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.status == OK]
        for column, meaning in PERPLEXITIES.items():
            measured = [row for row in rows if getattr(row, column) is not None][: base.LONGEST]
            data = [_dot(name, row, column) for name, row in base.named(measured)]
            values = [dot["value"] for dot in data] + [0.0] * (column != "ppl")
            if len(data) > 1 and max(values) - min(values) >= SEEN:  # else the table says it
                panels.append(base.of_rows(f"{group.title}, {base.short(rows[0])}", meaning, data, measured))
    about = (
        "Lower is better. ΔPPL is what an arm has more than the baseline. The line is the 95 % interval by bootstrap "
        "over documents or prompts; no line: one sum was kept. An arm whose outputs are all the baseline's has 0."
    )
    axis = alt.Axis(title="perplexity", tickCount=6, format=".4~g")
    x = alt.X("value:Q", axis=axis, scale=alt.Scale(zero=False, padding=12))
    tips = ["arm:N", "value:Q", "low:Q", "high:Q", "point:N"]
    dots = base.rows_chart().mark_point(filled=True, size=90, opacity=1, yOffset=4)
    dots = dots.encode(x=x, y=base.arm_axis(), color=base.colour("arm", legend=False), tooltip=tips)
    return base.figure("perplexity", "Perplexity", about, base.by_arm(base.spans(tips), dots), panels)


def identical(groups: Iterable[Group], points: Sequence[Point]) -> list[Figure]:
    """How many outputs of each arm are the baseline's, and as a control how many of plain decoding's own are."""
    by_id = {point.id: point for point in points}
    panels = []
    for group in groups:
        arms = [row for row in group.rows if row.status == OK and row.arm != "baseline"]
        rows = [row for row in arms if row.identical is not None and row.outputs][: base.LONGEST]
        plain = by_id.get(group.rows[0].point)
        data = [_equal(name, row.identical or 0, row.outputs or 1, row.point) for name, row in base.named(rows)]
        if data and plain is not None and plain.arm["arm"] == "baseline":
            data = [_equal(name, *counts, plain.id) for name, counts in controls(plain, points).items()] + data
        where = f"{group.title}, {base.short(group.rows[0])}"
        panels.append(base.of_rows(where, "outputs equal to plain decoding's, token for token", data, rows))
    axis = alt.Axis(title="share of outputs", format="%", tickCount=6)
    x = alt.X("share:Q", axis=axis, scale=alt.Scale(domain=[0, 1]))
    tips = ["arm:N", "share:Q", "identical:Q", "outputs:Q", "point:N"]
    about = (
        "Drafts are verified, so outputs differ where the arithmetic of a batch decides a near-tie between two tokens. "
        "Plain decoding differs from itself in the same way at another batch size: that is the control, in grey. "
        "`selfspec verify` tells such near-ties from faults."
    )
    chart = base.by_arm(base.bars(x, tips, color=base.colour("arm", legend=False)))
    return base.figure("identical", "Identical outputs", about, chart, panels)


def controls(plain: Point, points: Iterable[Point]) -> dict[str, tuple[int, int]]:
    """(equal, compared) outputs, by name, of a baseline and of plain decoding with its prompts at other loads."""
    counts: dict[str, tuple[int, int]] = {}
    if (again := control(plain)) is not None:
        counts["control: plain decoding, asked again"] = again
    for other in points:
        if other is plain or not other.outputs or _prompts(other) != _prompts(plain):
            continue
        pairs = [pair for pair in zip(plain.outputs, other.outputs, strict=True) if all(pair)]
        if pairs:
            load = asked(tables.of_arm(other.arm))
            counts[f"control: plain decoding, {load}"] = (sum(one == two for one, two in pairs), len(pairs))
    return counts


def _prompts(point: Point) -> tuple[Any, ...]:
    """What two measurements of plain decoding agree in that should have the same outputs."""
    names = ("arm", "model", "workload", "input_len", "output_len", "temperature", "seed")
    return (*(point.arm.get(name) for name in names), len(point.outputs), point.device, tuple(point.digests.items()))


def _equal(name: str, same: int, outputs: int, point: str) -> dict[str, Any]:
    counts = {"share": base.sig(same / outputs), "identical": same, "outputs": outputs}
    return {"arm": name, **counts, "text": f"{same} of {outputs}", "point": point}


def _dot(name: str, row: Record, column: str) -> dict[str, Any]:
    ends = {"value": column, "low": f"{column}_low", "high": f"{column}_high"}
    values = {end: getattr(row, of_end, None) for end, of_end in ends.items()}
    # Perplexities that are equal differ by rounding, in the ninth digit.
    rounded = {end: None if value is None else base.sig(round(value, 6)) for end, value in values.items()}
    return {"arm": name, **rounded, "text": f"{rounded['value']:.4g}", "point": row.point}
