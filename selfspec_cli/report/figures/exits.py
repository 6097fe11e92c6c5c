"""Figures of what other commands leave in a results folder: exit heads, and ROC curves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.record.head_rows import HeadRow
from selfspec_cli.report.figures.base import Figure, Panel, figure, rows_chart, sig

HEAD_PANELS = {
    "agreement_generated": "agreement with the full model on its own generations",
    "agreement": "agreement with the full model on held-out text",
    "predicted_speedup": "speedup predicted at the best draft length; crosses are measured",
}


def heads(by_folder: Mapping[str, Sequence[HeadRow]]) -> list[Figure]:
    """Agreement and predicted speedup by exit layer, a line a head."""
    panels = []
    names = list(dict.fromkeys(row.head for rows in by_folder.values() for row in rows))
    for folder, rows in by_folder.items():
        for column, meaning in HEAD_PANELS.items():
            data = [
                {
                    "head": row.head,
                    "series": f"{row.head} {row.vocab}",
                    "vocab": "all tokens" if row.vocab == "full" else "draft vocabulary",
                    "E": row.E,
                    "value": sig(getattr(row, column)),
                    "k": row.best_k,
                    "measured": sig(row.measured_speedup) if column == "predicted_speedup" else None,
                }
                for row in sorted(rows, key=lambda row: row.E)
                if getattr(row, column) is not None
            ]
            panels.append(Panel(f"{folder} ({rows[0].model})" if rows else folder, meaning, data))
    colour = alt.Color(
        "head:N",
        scale=alt.Scale(domain=names, range=list(head_colours(names).values())),
        legend=alt.Legend(title=None, orient="bottom", columns=2, labelLimit=170),
    )
    x = alt.X("E:O", axis=alt.Axis(title="exit layer E", labelAngle=0))
    tips = ["head:N", "vocab:N", "E:O", "k:O", "value:Q", "measured:Q"]
    legend = alt.Legend(
        title=None, orient="bottom", columns=1, symbolType="stroke", symbolStrokeColor="#84909c", symbolSize=400
    )
    dash = alt.StrokeDash(
        "vocab:N", legend=legend, scale=alt.Scale(domain=["all tokens", "draft vocabulary"], range=[[1, 0], [3, 3]])
    )
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=False))
    each = rows_chart().encode(x=x, y=y, color=colour, detail="series:N", tooltip=tips)
    # Points are marks of their own: with those of the line the legend's symbols have no stroke.
    line = each.mark_line().encode(strokeDash=dash) + each.mark_point(filled=True, opacity=1, size=30)
    crosses = (
        rows_chart()
        .transform_filter("datum.measured != null")
        .mark_point(shape="cross", size=110, angle=45)
        .encode(x=x, y="measured:Q", color=colour, tooltip=tips)
    )
    chart = (line + crosses).properties(width="container", height=320)
    about = "What `selfspec fit --compare` found of each exit head at each layer; a higher line is a better draft."
    return figure("heads", "Exit heads", about, chart, panels)


def head_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each head by its short name: that of its kind, lighter for each further head of one kind."""
    colours: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name in names:
        # By the beginning of the name: rows may be of heads that there are no longer, such as translator_kl.
        kind = max((kind for kind in HEADS if f"{name}_".startswith(f"{kind}_")), key=len, default=next(iter(HEADS)))
        lighter = min(0.75, 0.16 * seen[kind])
        channels = [int(HEADS[kind].colour[at : at + 2], 16) for at in (1, 3, 5)]
        colours[name] = "#" + "".join(f"{round(channel + (255 - channel) * lighter):02x}" for channel in channels)
        seen[kind] += 1
    return colours


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
    gates = [gate for gate in GATES if gate != "none"]
    scale = alt.Scale(domain=gates, range=[GATES[gate].colour for gate in gates])
    colour = alt.Color("gate_name:N", scale=scale, legend=None)
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
