"""Figures of quality: perplexities and evaluation scores of the arms, with what says how sure they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import altair as alt

from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import OK
from selfspec_cli.report.figures.base import (
    LONGEST,
    STEP,
    Figure,
    Panel,
    figure,
    kind_colour,
    labels,
    look,
    names_above,
    rows_chart,
    short,
    sig,
)
from selfspec_cli.report.rows import Group

PERPLEXITIES = {
    "ppl": "perplexity of held-out text under the arm's own predictions",
    "ppl_of_greedy": "perplexity of its greedy generations under the plain model",
    "ppl_of_sampled": "perplexity of its sampled generations under the plain model",
}
_SCORE = re.compile(r"(?P<name>\S+ \S+) (?P<value>[-\d.]+)(?: ± (?P<error>[\d.]+))?(?P<drafted> \(drafted\))?")
"""One of `record.quality.score_in_words`, which make the column `scores`."""


def perplexities(groups: Iterable[Group]) -> list[Figure]:
    """A dot an arm, with the interval over documents or prompts."""
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.status == OK]
        for column, meaning in PERPLEXITIES.items():
            known = [row for row in rows if getattr(row, column) is not None][:LONGEST]
            ends = [(getattr(row, f"{column}_low"), getattr(row, f"{column}_high")) for row in known]
            data = [
                _dot(name, row, getattr(row, column), *pair)
                for name, row, pair in zip(labels(known), known, ends, strict=True)
            ]
            panels.append(_panel(group, meaning, known, data))
    about = (
        "Lower is better. The line is the 95 % interval by bootstrap over documents or prompts; no line: one sum was "
        "kept. A verified arm is exact, and its perplexity is the baseline's."
    )
    return figure("perplexity", "Perplexity", about, _dots("perplexity"), panels)


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
    ends = {"value": sig(value), "low": sig(low), "high": sig(high)}
    return {"arm": name, **look(row), **ends, "text": f"{value:.4g}", "point": row.point}


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
    number = rows_chart().mark_text(align="right", baseline="bottom", dy=-8)
    return (
        whisker
        + dots.encode(x=x, y=y, color=kind_colour(), tooltip=tips)
        + names_above()
        + number.encode(x=alt.value("width"), y=y, text="text:N")
    ).properties(width="container", height=alt.Step(STEP))
