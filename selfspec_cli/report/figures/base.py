"""What every figure is made of: one chart, and a panel of data for each thing that it can be drawn of.

A chart is Vega-Lite, made by Altair. It names its data ("rows") and does not hold them, so the page draws any panel
with the same chart, and a page of thousands of points holds each chart once.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt

from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import OK
from selfspec_cli.report.rows import Group, label

ROWS = "rows"
NAMES, VALUES, LOAD, LETTERS = "NAMES", "COLOURS", "LOAD", "LETTERS"
"""Stand in a chart for what `Panel` has, and whoever draws it puts in (`with_panel`, and page.js): the names drawn, the
colour of each, and the title of the axis of load. LETTERS: how many letters a line of a legend has room for."""
PLAIN, LOSSY, RED = "#84909c", "#b7791f", "#d64550"
RIVALS = ["#958a7c", "#6c7781", "#7f8a80", "#8f8296"]
SERIES = ["#3b82c4", "#c2681f", "#2f9e77", "#9b6bd3", "#c9518d", "#7d8a2e"]
SERIES += ["#2a97a8", "#a8664b", "#6f7fd1", "#b0577a", "#4f9a4a", "#8a6fb0"]
"""All colours stand out from a white and from a dark page. Greys: plain decoding and vLLM's own methods."""
STEP = 36  # pixels for a bar and the text above it
SPACE, LETTER = "\u2003", 6.6  # between a value and a name; pixels of a letter, on average
LONGEST_NAME = 120  # letters of a name in a legend of a picture
WIDTH = 760  # pixels of a chart in a file
LONGEST = 40  # bars of one panel; the rest are in the table


@dataclass(frozen=True)
class Panel:
    """One set of data of a figure. group: what it has in common with other panels. points: ids of the points in it.
    axis: title of the axis of load. colours: of each name, in the order of a legend (`figures.coloured`)."""

    group: str
    name: str
    data: list[dict[str, Any]]
    points: tuple[str, ...] = ()
    note: str = ""
    axis: str = ""
    colours: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """name: of its files and its place in the page. about: how to read it. panels: at least one."""

    name: str
    title: str
    about: str
    chart: Any
    panels: list[Panel] = field(default_factory=list)

    def spec(self) -> dict[str, Any]:
        """The chart as Vega-Lite, without data."""
        return {name: part for name, part in self.chart.to_dict().items() if name not in ("config", "datasets")}


def with_panel(spec: dict[str, Any], panel: Panel) -> dict[str, Any]:
    """A chart with the names, colours and axis of a panel in it."""
    text = json.dumps(spec)
    for word, value in ((NAMES, list(panel.colours)), (VALUES, list(panel.colours.values()))):
        text = text.replace(json.dumps([word]), json.dumps(value))
    text = text.replace(LETTERS, str(LONGEST_NAME))
    made: dict[str, Any] = json.loads(text.replace(json.dumps(LOAD), json.dumps(panel.axis)))
    return made


def config(ink: str, muted: str, line: str) -> dict[str, Any]:
    """How charts look, in three colours: of text, of the text of axes, and of lines."""
    axis = {"labelColor": muted, "titleColor": muted, "gridColor": line, "domain": False, "ticks": False}
    sizes = {"titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12, "labelPadding": 6}
    legend = {"labelColor": ink, "labelFontSize": 12, "labelLimit": WIDTH, "symbolType": "circle"}
    return {
        "background": "#ffffff",
        "font": "sans-serif",
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
        "tick": {"color": ink},
        "view": {"stroke": None},
        "title": {"anchor": "start", "color": ink, "subtitleColor": muted, "fontSize": 15, "offset": 12},
        "axis": axis | sizes,
        "legend": legend | {"layout": {"bottom": {"anchor": "start", "direction": "vertical"}}},
    }


def figure(name: str, title: str, about: str, chart: Any, panels: Sequence[Panel]) -> list[Figure]:
    """A figure as a list of one; of none where no panel has data. Panels that would have one name are numbered."""
    kept, seen = [], Counter[tuple[str, str]]()
    for panel in panels:
        if panel.data:
            seen[panel.group, panel.name] += 1
            number = seen[panel.group, panel.name]
            kept.append(panel if number == 1 else replace(panel, name=f"{panel.name} ({number})"))
    return [Figure(name, title, about, chart, kept)] if kept else []


def rows_chart() -> Any:
    """A chart of the panel's data, as wide as its place."""
    return alt.Chart(alt.NamedData(name=ROWS))


def of_rows(group: str, name: str, data: list[dict[str, Any]], rows: Sequence[Record], note: str = "") -> Panel:
    return Panel(group, name, data, tuple(row.point for row in rows), note)


def on_machine(group: Group, data: list[dict[str, Any]], rows: Sequence[Record]) -> list[Panel]:
    """A panel of a group under the machine that measured it; none without rows."""
    return [of_rows(short(rows[0]), group.title, data, rows)] if rows else []


def slower(row: Record) -> bool:
    """Whether an arm is slower than its baseline beyond noise: its whole interval is below 1."""
    return row.speedup_high is not None and row.speedup_high < 1


def colour(name: str, *, legend: bool = True) -> Any:
    """The colour of what a panel draws: one for each arm, the same on the whole page. name: the field that names it."""
    text, half = "datum.label", f"floor({LETTERS} / 2) - 1"
    # Where the name of an arm is too long its middle goes: names differ at their ends.
    cut = f"slice({text}, 0, {half}) + ' … ' + slice({text}, length({text}) - {half})"
    short_name = f"length({text}) > {LETTERS} ? {cut} : {text}"
    about = {"orient": "bottom", "columns": 1, "symbolLimit": 16, "symbolOpacity": 1, "labelExpr": short_name}
    shown = alt.Legend(title=None, **about) if legend else None
    return alt.Color(f"{name}:N", sort=None, scale=alt.Scale(domain=[NAMES], range=[VALUES]), legend=shown)


def titles_above() -> Any:
    """The value (`text`) and the name (`arm`) of each bar above it, red where the arm is slower than its baseline. They
    are one text, so that neither runs into the other, broken into two lines where the place is narrow."""
    lines = "[slice(datum.title, 0, datum.cut + 2), slice(datum.title, datum.cut + 3)]"
    chart = rows_chart().transform_calculate(title=f"datum.text + '{SPACE}' + datum.arm")
    chart = chart.transform_calculate(cut=f"lastindexof(slice(datum.title, 0, floor(width / {LETTER})), ' · ')")
    is_long = f"length(datum.title) * {LETTER} > width && datum.cut > 0"
    chart = chart.transform_calculate(title=f"{is_long} ? {lines} : datum.title")
    above = alt.expr("isArray(datum.title) ? -20 : -6")
    chart = chart.mark_text(align="left", baseline="line-bottom", dy=above, fontSize=12, lineHeight=14)
    red = {"condition": {"test": "datum.slower === true", "value": RED}}
    return chart.encode(x=alt.value(0), y=arm_axis(), text="title:N", color=red)


def arm_axis() -> Any:
    return alt.Y("arm:N", sort=None, axis=None)


def bars(x: Any, tips: Sequence[Any], **more: Any) -> Any:
    return rows_chart().mark_bar(size=13, yOffset=4).encode(x=x, y=arm_axis(), tooltip=tips, **more)


def spans(tips: Sequence[Any]) -> Any:
    rule = rows_chart().transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2, yOffset=4)
    return rule.encode(x="low:Q", x2="high:Q", y=arm_axis(), tooltip=tips)


def by_arm(*layers: Any) -> Any:
    """Layers with a row for each arm, under its name and value."""
    return alt.layer(*layers, titles_above()).properties(width="container", height=alt.Step(STEP))


def dots(chart: Any, size: int) -> Any:
    """A dot of `size` square pixels for each row of a chart."""
    return chart.mark_point(filled=True, size=size, opacity=1)


def unit_line(**place: str) -> Any:
    """A dashed line at a speedup of 1. place: its encoding, of `one:Q`."""
    return alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(**place)


def load_axis() -> Any:
    """The axis of what is asked of an engine at once."""
    scale = alt.Scale(paddingInner=0.75, paddingOuter=0.4)  # the rest of a step is for `beside`
    return alt.X("load:O", axis=alt.Axis(title=LOAD, labelAngle=0), scale=scale)


def beside() -> Any:
    """Arms stand next to each other at one load, so that no interval hides another."""
    return alt.XOffset("series:N", sort=None, scale=alt.Scale(type="point", domain=[NAMES]))


def dashes() -> Any:
    """A line of plain decoding is dashed, as the line of a speedup of 1 is; other lines are whole."""
    return alt.condition("datum.series === 'baseline'", alt.value([5, 3]), alt.value([1, 0]))


def whiskers(x: Any, **more: Any) -> Any:
    """Intervals of a chart of lines, from `low` to `high`."""
    rule = rows_chart().transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    return rule.encode(x=x, y="low:Q", y2="high:Q", **more)


def times_axis(title: str) -> Any:
    return alt.Axis(title=title, labelExpr="datum.label + 'x'", tickCount=6)


def measured(group: Group) -> list[Record]:
    """The rows of a group that have a speedup, the fastest first after the baseline."""
    rows = [row for row in group.rows if row.status == OK and row.speedup is not None]
    return sorted(rows, key=lambda row: (row.arm != "baseline", -(row.speedup or 0)))


def name_of(row: Record) -> str:
    """The name of an arm; the title of what it is in says where acceptance was set."""
    return label(replace(row, acceptance_length=None))


def named(rows: Sequence[Record]) -> list[tuple[str, Record]]:
    """Each row of a group with its name, no two alike."""
    names: list[str] = []
    for row in rows:
        name = name_of(row)
        names.append(f"{name} [{row.key[:6]}]" if name in names else name)
    return list(zip(names, rows, strict=True))


def sig(value: float | None, digits: int = 5) -> float | None:
    """A number rounded to `digits` significant digits."""
    return None if value is None else float(f"{value:.{digits}g}")


def numbers(row: Record, **columns: str) -> dict[str, Any]:
    """Columns of a row by their names in a chart, rounded; and the point that they are of."""
    return {name: sig(getattr(row, column)) for name, column in columns.items()} | {"point": row.point}


def speedup(row: Record) -> dict[str, Any]:
    """The speedup of a row with its interval, and its tokens a second."""
    return numbers(row, speedup="speedup", low="speedup_low", high="speedup_high", tok_s="tok_s_median")


def short(row: Record) -> str:
    return row.device or "machine unknown"
