"""Figures of what other commands leave in a results folder: ROC curves, the costs of a round's steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.report.figures.base import SERIES, Figure, Panel, bars, by_arm, figure, rows_chart, sig

STEPS = {
    "plain": "plain decoding step",
    "T": "plain decoding step",
    "verify": "verify pass",
    "draft": "draft step",
    "verify_token": "each draft more in a verify pass",
    "start": "start of a round",
    "overhead": "draft step, without its layers",
    "per_layer": "one layer of a draft step",
    "head": "exit head of a draft step",
}


def roc(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Figure]:
    """ROC curves of the gates, a panel an exit."""
    panels = []
    for folder, exits in curves.items():
        for measured in exits:
            data = [
                {"gate": f"{gate} {area:.2f}", "gate_name": gate, "false": sig(x, 4), "true": sig(y, 4)}
                for gate, area, xs, ys in ((c["gate"], c["auc"], c["false"], c["true"]) for c in measured["curves"])
                for x, y in zip(xs, ys, strict=True)
            ]
            panels.append(Panel(folder, f"{measured['title']}: {measured['of']}", data))
    colour = _gate_colours("gate_name", [gate for gate in GATES if gate != "none"])
    x = alt.X("false:Q", axis=alt.Axis(title="rejected drafts that pass the gate", format="%", tickCount=5))
    y = alt.Y("true:Q", axis=alt.Axis(title="accepted drafts that pass the gate", format="%", tickCount=5))
    line = (
        rows_chart()
        .mark_line(strokeWidth=2)
        .encode(x=x, y=y, color=colour, order="false:Q", detail="gate:N", tooltip=["gate:N", "false:Q", "true:Q"])
    )
    chance = (
        alt.Chart(alt.Data(values=[{"at": 0}, {"at": 1}]))
        .mark_line(strokeDash=[4, 3], color="#84909c")
        .encode(x="at:Q", y="at:Q")
    )
    key = (
        rows_chart()
        .transform_aggregate(groupby=["gate", "gate_name"])
        .transform_window(place="row_number()")
        .mark_text(align="right", fontSize=12)
        .encode(x=alt.value("width"), y=alt.Y("place:O", axis=None), text="gate:N", color=colour)
        .properties(width="container", height=alt.Step(18))
    )
    chart = alt.vconcat((chance + line).properties(width="container", height=320), key)
    about = (
        "How well each gate tells drafts that will stand from those that will not. The number beside a gate is the "
        "area under its curve: 1 for a perfect gate, 0.5 for one that tells nothing."
    )
    return figure("roc", "ROC of the gates", about, chart, panels)


def _gate_colours(name: str, gates: Sequence[str]) -> Any:
    scale = alt.Scale(domain=gates, range=[GATES[gate].colour for gate in gates])
    return alt.Color(f"{name}:N", scale=scale, legend=None)


def areas(by_folder: Mapping[str, Sequence[Mapping[str, str]]]) -> list[Figure]:
    """The area under each gate's curve, at each exit, from the table of `selfspec roc`."""
    panels = []
    for folder, rows in by_folder.items():
        for name in dict.fromkeys((row["model"], row["E"], row["head"]) for row in rows):
            members = [row for row in rows if (row["model"], row["E"], row["head"]) == name and row["auc"]]
            data = [
                {
                    "arm": row["gate"],
                    "auc": float(row["auc"]),
                    "at_stake": float(row["auc_at_stake"] or "nan"),
                    "text": f"{float(row['auc']):.2f}, {float(row['expected_speedup']):.2f}x",
                }
                for row in sorted(members, key=lambda row: -float(row["auc"]))
            ]
            panels.append(
                Panel(folder, f"{name[0]} E={name[1]} {name[2]}, {members[0]['drafted']} tokens drafted", data)
            )
    x = alt.X("auc:Q", axis=alt.Axis(title="area under the ROC curve", tickCount=6), scale=alt.Scale(domain=[0, 1]))
    chance = alt.Chart(alt.Data(values=[{"at": 0.5}])).mark_rule(strokeDash=[4, 3]).encode(x="at:Q")
    tips = ["arm:N", "auc:Q", "at_stake:Q"]
    chart = by_arm(bars(x, tips, color=_gate_colours("arm", list(GATES))), chance)
    about = (
        "From real drafts: an area of 0.5 (dashed) tells nothing. Beside it the speedup that the best threshold is "
        "expected to bring."
    )
    return figure("auc", "Which gate tells good drafts from bad", about, chart, panels)


def step_costs(by_folder: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Milliseconds of each step of a round, as they were timed."""
    panels = []
    for folder, costs in by_folder.items():
        data = [
            {"arm": STEPS.get(name, name), "ms": sig(1000 * seconds), "text": f"{1000 * seconds:.3g} ms"}
            for name, seconds in costs.items()
            if name != "layers" and seconds > 0
        ]
        panels.append(Panel("", folder, data))
    x = alt.X("ms:Q", axis=alt.Axis(title="milliseconds", tickCount=6))
    chart = by_arm(bars(x, ["arm:N", "ms:Q"], color=alt.value(SERIES[0])))
    about = "What the cost model is fed with: the time of each step, from rounds timed in the engine."
    return figure("steps", "What the steps of a round cost", about, chart, panels)
