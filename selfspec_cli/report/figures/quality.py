"""Figures of quality: identical outputs, and perplexities with what says how sure they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import OK, Point, control
from selfspec_cli.record.tables import asked
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.rows import Group

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
    """How many outputs of each arm are the baseline's, and how many of plain decoding's own are at another load or when
    it is asked again: the control, which says how many would differ without any drafts."""
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
    """(equal, compared) outputs of a baseline and of plain decoding measured again with the same prompts, by name. Of
    several measurements at one load the newest counts."""
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
