"""What every figure is made of: one chart, and a panel of data for each thing that it can be drawn of.

A chart is Vega-Lite, made by Altair. It names its data ("rows") and does not hold them, so the page draws any panel
with the same chart, and a page of thousands of points holds each chart once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt

from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import OK
from selfspec_cli.report.rows import Group, label

ROWS = "rows"
FASTER, SLOWER, PLAIN, LOSSY = "faster than the baseline", "slower than the baseline", "baseline", "not verified"
COLOURS = {FASTER: "#3b82c4", SLOWER: "#d64550", PLAIN: "#84909c", LOSSY: "#b7791f"}
"""Of arms. All of them stand out from a white and from a dark page."""
SERIES = ["#3b82c4", "#c2681f", "#2f9e77", "#9b6bd3", "#c9518d", "#7d8a2e", "#2a97a8", "#a8664b", "#6f7fd1", "#84909c"]
STEP = 36  # pixels for a bar and the text above it
LONGEST = 40  # bars of one panel; the rest are in the table


@dataclass(frozen=True)
class Panel:
    """One set of data of a figure. group: what it has in common with other panels. points: ids of the points in it."""

    group: str
    name: str
    data: list[dict[str, Any]]
    points: tuple[str, ...] = ()
    note: str = ""


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
        spec: dict[str, Any] = self.chart.to_dict()
        for unused in ("config", "datasets"):
            spec.pop(unused, None)
        return spec


def figure(name: str, title: str, about: str, chart: Any, panels: Sequence[Panel]) -> list[Figure]:
    """A figure as a list of one; of none where no panel has data."""
    kept = [panel for panel in panels if panel.data]
    return [Figure(name, title, about, chart, kept)] if kept else []


def rows_chart() -> Any:
    """A chart of the panel's data, as wide as its place."""
    return alt.Chart(alt.NamedData(name=ROWS))


def kind(row: Record) -> str:
    """What the colour of an arm says."""
    if row.arm == "baseline":
        return PLAIN
    if row.speedup is not None and row.speedup < 1:
        return SLOWER
    return LOSSY if row.arm == "skip" else FASTER


def look(row: Record) -> dict[str, str]:
    """The column that `kind_colour` reads."""
    return {"kind": kind(row)}


def kind_colour(**options: Any) -> Any:
    """The colour of arms, with a legend; whoever draws it leaves out the kinds that a panel has not."""
    legend = alt.Legend(title=None, orient="top", columns=2)
    return alt.Color(
        "kind:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), legend=legend, **options
    )


def series_colour() -> Any:
    """A colour for each line, with a legend below that may be long."""
    legend = alt.Legend(title=None, orient="bottom", columns=1, symbolLimit=12)
    return alt.Color("series:N", sort=None, scale=alt.Scale(range=SERIES), legend=legend)


def names_above() -> Any:
    """The name of each bar above it, where it has the whole width."""
    return (
        rows_chart()
        .mark_text(align="left", baseline="bottom", dy=-8, fontSize=12)
        .encode(x=alt.value(0), y=alt.Y("arm:N", sort=None, axis=None), text="arm:N")
    )


def times_axis(title: str) -> Any:
    """An axis of speedups."""
    return alt.Axis(title=title, labelExpr="datum.label + 'x'", tickCount=6)


def measured(group: Group) -> list[Record]:
    """The rows of a group that have a speedup, the fastest first after the baseline."""
    rows = [row for row in group.rows if row.status == OK and row.speedup is not None]
    return sorted(rows, key=lambda row: (row.arm != "baseline", -(row.speedup or 0)))


def labels(rows: Sequence[Record]) -> list[str]:
    """A name for each row of a group, no two alike; the group's title says where acceptance was set."""
    names: list[str] = []
    for row in rows:
        name = label(replace(row, acceptance_length=None))
        names.append(f"{name} [{row.key[:6]}]" if name in names else name)
    return names


def sig(value: float | None, digits: int = 5) -> float | None:
    """A number with so many digits as a reader can use."""
    return None if value is None else float(f"{value:.{digits}g}")


def short(row: Record) -> str:
    """The machine of a row, to end the name of a panel with."""
    return row.device or "machine unknown"
