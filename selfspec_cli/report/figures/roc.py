"""The figure of what `selfspec roc` leaves in a results folder."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.report.figures.base import Figure, Panel, figure, rows_chart, sig


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
