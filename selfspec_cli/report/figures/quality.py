"""Figures of quality: perplexities and evaluation scores of the arms, with what says how sure they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.load_words import asked
from selfspec_cli.record.point import OK, Point, control
from selfspec_cli.report.figures.base import (
    LONGEST,
    STEP,
    Figure,
    Panel,
    colour,
    figure,
    labels,
    rows_chart,
    short,
    sig,
    titles_above,
)
from selfspec_cli.report.rows import Group

PERPLEXITIES = {
    "delta_ppl": "ΔPPL of held-out text under the arm's own predictions",
    "delta_ppl_of_greedy": "ΔPPL of its greedy generations under the plain model",
    "delta_ppl_of_sampled": "ΔPPL of its sampled generations under the plain model",
    "ppl": "perplexity of held-out text under the arm's own predictions",
}
_SCORE = re.compile(r"(?P<name>\S+ \S+) (?P<value>[-\d.]+)(?: ± (?P<error>[\d.]+))?(?P<drafted> \(drafted\))?")
"""One of `record.quality.score_in_words`, which make the column `scores`."""


def perplexities(groups: Iterable[Group]) -> list[Figure]:
    """A dot an arm, with the interval over documents or prompts, where two arms or more have one and they differ."""
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.status == OK]
        for column, meaning in PERPLEXITIES.items():
            known = [row for row in rows if getattr(row, column) is not None][:LONGEST]
            ends = [(getattr(row, f"{column}_low", None), getattr(row, f"{column}_high", None)) for row in known]
            data = [
                _dot(name, row, getattr(row, column), *pair)
                for name, row, pair in zip(labels(known), known, ends, strict=True)
            ]
            if len(data) > 1 and any(one["value"] for one in data):  # else the table says it
                panels.append(_panel(group, meaning, known, data))
    about = (
        "Lower is better. ΔPPL is what an arm has more than the baseline. The line is the 95 % interval by bootstrap "
        "over documents or prompts; no line: one sum was kept. An arm whose outputs are all the baseline's has 0."
    )
    return figure("perplexity", "Perplexity", about, _dots("perplexity"), panels)


def identical(groups: Iterable[Group], points: Sequence[Point]) -> list[Figure]:
    """How many outputs of each arm are the baseline's, and how many of plain decoding's own are at another load or when
    it is asked again: the control, which says how many would differ without any drafts."""
    by_id = {point.id: point for point in points}
    panels = []
    for group in groups:
        arms = [row for row in group.rows if row.status == OK and row.arm != "baseline"]
        rows = [row for row in arms if row.identical is not None and row.outputs][:LONGEST]
        base = by_id.get(group.rows[0].point)
        found = [
            _equal(name, row.identical or 0, row.outputs or 1, row.point)
            for name, row in zip(labels(rows), rows, strict=True)
        ]
        if found and base is not None and base.arm["arm"] == "baseline":
            found = [_equal(name, *counts, base.id) for name, counts in controls(base, points).items()] + found
        panels.append(_panel(group, "outputs equal to plain decoding's, token for token", rows, found))
    x = alt.X(
        "share:Q", axis=alt.Axis(title="share of outputs", format="%", tickCount=6), scale=alt.Scale(domain=[0, 1])
    )
    tips = ["arm:N", "share:Q", "identical:Q", "outputs:Q", "point:N"]
    bars = rows_chart().mark_bar(size=13, yOffset=4)
    bars = bars.encode(x=x, y=alt.Y("arm:N", sort=None, axis=None), color=colour("arm", legend=False), tooltip=tips)
    about = (
        "Drafts are verified, so outputs differ where the arithmetic of a batch decides a near-tie between two tokens. "
        "Plain decoding differs from itself in the same way at another batch size: that is the control, in grey. "
        "`selfspec verify` tells such near-ties from faults."
    )
    chart = (bars + titles_above()).properties(width="container", height=alt.Step(STEP))
    return figure("identical", "Identical outputs", about, chart, panels)


def controls(base: Point, points: Iterable[Point]) -> dict[str, tuple[int, int]]:
    """(equal, compared) outputs of a baseline and of plain decoding measured again with the same prompts, by name.

    Of several measurements at one load the newest counts.
    """
    found: dict[str, tuple[int, int]] = {}
    if (again := control(base)) is not None:
        found["control: plain decoding, asked again"] = again
    for other in points:
        if other is base or not other.outputs or _prompts(other) != _prompts(base):
            continue
        pairs = [pair for pair in zip(base.outputs, other.outputs, strict=True) if all(pair)]
        if pairs:
            load = asked(tables.of_arm(other.arm))
            found[f"control: plain decoding, {load}"] = (sum(one == two for one, two in pairs), len(pairs))
    return found


def _prompts(point: Point) -> tuple[Any, ...]:
    """What two measurements of plain decoding agree in that should have the same outputs."""
    names = ("arm", "model", "workload", "input_len", "output_len", "temperature", "seed")
    return (*(point.arm.get(name) for name in names), len(point.outputs), point.device, tuple(point.digests.items()))


def _equal(name: str, same: int, outputs: int, point: str) -> dict[str, Any]:
    return {
        "arm": name,
        "share": sig(same / outputs),
        "identical": same,
        "outputs": outputs,
        "text": f"{same} of {outputs}",
        "point": point,
    }


def scores(groups: Iterable[Group]) -> list[Figure]:
    """A dot an arm and task, with one standard error to each side."""
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.status == OK and row.scores]
        by_title: dict[str, list[tuple[Record, dict[str, Any]]]] = {}
        for row in rows:
            for found in map(_SCORE.fullmatch, (row.scores or "").split("; ")):
                if found is not None:
                    title = found["name"] + (" (drafted)" if found["drafted"] else "")
                    by_title.setdefault(title, []).append((row, found.groupdict()))
        for title, members in by_title.items():
            known = [row for row, _ in members][:LONGEST]
            data = []
            for name, (row, score) in zip(labels(known), members, strict=False):
                value, error = float(score["value"]), score["error"] and float(score["error"])
                low, high = (value - error, value + error) if error is not None else (None, None)
                data.append(_dot(name, row, value, low, high))
            panels.append(_panel(group, title, known, data))
    about = (
        "What `selfspec eval` found; the line is one standard error to each side. Only a task that goes through "
        "drafting, marked so, can differ for a verified arm."
    )
    return figure("scores", "Evaluation scores", about, _dots("score"), panels)


def _dot(name: str, row: Record, value: float, low: float | None, high: float | None) -> dict[str, Any]:
    # Perplexities that are equal differ by rounding, in the ninth digit.
    ends = {"value": value, "low": low, "high": high}
    rounded = {end: None if number is None else sig(round(number, 6)) for end, number in ends.items()}
    return {"arm": name, **rounded, "text": f"{rounded['value']:.4g}", "point": row.point}


def _panel(group: Group, name: str, rows: list[Record], data: list[dict[str, Any]]) -> Panel:
    where = f"{group.title}, {short(rows[0])}" if rows else ""
    return Panel(where, name, data, tuple(row.point for row in rows))


def _dots(title: str) -> Any:
    y = alt.Y("arm:N", sort=None, axis=None)
    x = alt.X(
        "value:Q", axis=alt.Axis(title=title, tickCount=6, format=".4~g"), scale=alt.Scale(zero=False, padding=12)
    )
    tips = ["arm:N", "value:Q", "low:Q", "high:Q", "point:N"]
    known = rows_chart().transform_filter("isValid(datum.low)")
    whisker = known.mark_rule(strokeWidth=2, yOffset=4).encode(x="low:Q", x2="high:Q", y=y, tooltip=tips)
    dots = rows_chart().mark_point(filled=True, size=90, opacity=1, yOffset=4)
    dots = dots.encode(x=x, y=y, color=colour("arm", legend=False), tooltip=tips)
    return (whisker + dots + titles_above()).properties(width="container", height=alt.Step(STEP))
