"""Figures by load: the speedup, the speed of one user and of one GPU, and what a request waits for."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import altair as alt

from selfspec_cli import load_patterns
from selfspec_cli.record import statistics, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import Point
from selfspec_cli.record.tables import UNVERIFIED
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure, Panel
from selfspec_cli.report.rows import RIVALS, Group, acceptance, group_title, sampling, task

AXES = {"batch": "requests in flight", "clients": "clients", "rate": "requests that arrive in a second"}
MOST_ARMS, MOST_RIVALS = 7, 4  # of one panel
ALIKE = ("model", "device", "workload", "input_len", "output_len", "temperature", "acceptance_length")  # of a family
ENOUGH_LOADS = 3  # of a curve that shows where drafting stops to pay
MINUTES = {"tok_s": "tokens a second", "ttft": "TTFT p99, ms", "tpot": "TPOT p99, ms"}
WAITS = {"ttft": "time to first token (TTFT), ms", "tpot": "time per output token (TPOT), ms"}


@dataclass(frozen=True)
class Family:
    """Rows that differ in arm and load alone. axis: the load's column. left_out: arms that a panel has no room for."""

    title: str
    axis: str
    rows: list[Record]
    left_out: int = 0

    def panel(self, data: list[dict[str, Any]], note: str = "") -> Panel:
        more = f"Arms that are not drawn: {self.left_out}; the table has them." if self.left_out else ""
        notes = " ".join(filter(None, (note, more)))
        return replace(base.of_rows(base.short(self.rows[0]), self.title, data, self.rows, notes), axis=AXES[self.axis])

    def load(self, row: Record) -> float:
        return float(getattr(row, self.axis))

    def loads(self, *, arms: bool = False) -> set[float]:
        """The loads of all rows; arms: of those that draft."""
        return {self.load(row) for row in self.rows if not arms or row.arm != "baseline"}

    def series(self, rows: Iterable[Record] | None = None) -> list[tuple[dict[str, Any], Record]]:
        """Rows, each with its series and load as data, in the order in which a line goes through them."""
        ordered = sorted(self.rows if rows is None else rows, key=lambda row: (base.name_of(row), self.load(row)))
        return [({"series": base.name_of(row), "load": base.sig(self.load(row))}, row) for row in ordered]


def _axis(row: Record) -> str:
    if row.arrivals is None:
        return "batch"
    return "clients" if row.clients is not None else "rate"


def families(groups: Iterable[Group]) -> list[Family]:
    """Families of at least two loads: real acceptance first, then three loads or more, then the newest."""
    by_family: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for group in groups:
        rows = base.measured(group)
        first = next((row for row in rows if row.arm != "baseline"), None)
        if first is not None and getattr(first, axis := _axis(first)) is not None:
            drawn = ("rate", "load_share") if axis == "rate" else (axis,)
            alike = (*(getattr(first, name) for name in ALIKE), axis, load_patterns.comparable(first, without=drawn))
            by_family[alike] += rows
    together = [family for family in map(_family, by_family.values()) if len(family.loads(arms=True)) > 1]
    together.sort(key=lambda family: max(row.time or "" for row in family.rows), reverse=True)
    together.sort(key=lambda family: len(family.loads()) < ENOUGH_LOADS)
    return sorted(together, key=lambda family: any(row.acceptance_length is not None for row in family.rows))


def _family(rows: list[Record]) -> Family:
    """Rows of one family with as many arms as a reader can tell apart: those with the most loads, then the fastest."""
    first = next(row for row in rows if row.arm != "baseline")
    more = ", in a load test" if first.arrivals is not None else ""
    title = ", ".join(filter(None, (task(first) + more, sampling(first), acceptance(first))))
    family = Family(title, _axis(first), rows)
    arms: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        arms[base.name_of(row)].append(row)

    def rank(rows: list[Record]) -> tuple[int, float]:
        return -len({family.load(row) for row in rows}), -median([row.speedup or 0.0 for row in rows])

    ranked = sorted(arms.values(), key=rank)
    kept = [rows for rows in ranked if rows[0].arm == "baseline"]
    kept += [rows for rows in ranked if rows[0].arm in RIVALS][:MOST_RIVALS]
    kept += [rows for rows in ranked if rows[0].arm not in (*RIVALS, "baseline")][:MOST_ARMS]
    return replace(family, rows=[row for rows in kept for row in rows], left_out=len(arms) - len(kept))


def speedups(families: Sequence[Family]) -> list[Figure]:
    """The speedup of each arm over the baseline of the same load, with its interval."""
    panels = []
    for family in families:
        arms = family.series(row for row in family.rows if row.arm != "baseline")
        data = [dot | base.speedup(row) | {"slower": base.slower(row)} for dot, row in arms]
        panels.append(family.panel(data, at_a_glance(family)))
    tips = ["series:N", "load:O", "speedup:Q", "low:Q", "high:Q", "tok_s:Q", "point:N"]
    scale = alt.Scale(zero=False, nice=True)
    middle = alt.Y("median(speedup):Q", axis=base.times_axis("speedup"), scale=scale)
    each = base.rows_chart().encode(x=base.load_axis(), xOffset=base.beside(), color=base.colour("series"))
    line = each.mark_line(strokeWidth=2.5).encode(y=middle)  # of a median: with tooltips it would be of each point
    marks = base.dots(each, 70).encode(y=alt.Y("speedup:Q", scale=scale), tooltip=tips)
    losses = base.rows_chart().transform_filter("datum.slower")
    losses = losses.mark_point(size=190, color=base.RED, strokeWidth=2, shape="circle")
    marked = losses.encode(x=base.load_axis(), xOffset=base.beside(), y="speedup:Q", tooltip=tips)
    bars = base.whiskers(base.load_axis(), xOffset=base.beside(), color=base.colour("series"), tooltip=tips)
    chart = (base.unit_line(y="one:Q") + line + bars + marks + marked).properties(width="container", height=320)
    about = (
        "Tokens a second over plain decoding's at the same load. A vertical line is the 95 % interval; none: repeats "
        "were not kept. vLLM's own methods are grey. A red ring: slower than plain decoding, with the whole interval "
        "below 1. Where several runs measured an arm, its line goes through their median. At a load, arms stand in the "
        "order of the legend."
    )
    return base.figure("by_load", "Speedup by load", about, chart, panels)


def at_a_glance(family: Family) -> str:
    """The speedups of the first verified arm of ours by load, in a sentence; empty where none is of ours."""
    ours = [row for row in family.rows if row.arm not in (*RIVALS, *UNVERIFIED) and row.speedup is not None]
    if not ours:
        return ""
    by_load: dict[float, list[float]] = defaultdict(list)
    for row in ours:
        if base.name_of(row) == base.name_of(ours[0]):
            by_load[family.load(row)].append(row.speedup or 0.0)
    words = [f"{median(values):.2f}x at {load:g}" for load, values in sorted(by_load.items())]
    return f"{base.name_of(ours[0])}: {', '.join(words)} {AXES[family.axis]}."


def users_and_gpus(families: Sequence[Family]) -> list[Figure]:
    """What one user gets against what one GPU yields: each arm's line goes from few requests to many."""
    panels = []
    for family in families:
        cards = gpus(family.rows[0].device)
        together: dict[tuple[str, float], list[Record]] = defaultdict(list)
        for dot, row in family.series():
            if row.tok_s_median and user_speed(row):
                together[dot["series"], dot["load"]].append(row)
        numbered = base.name_of(next((row for row in family.rows if row.arm == "baseline"), family.rows[0]))
        data = []
        for (name, load), rows in together.items():
            number = load if name == numbered else None  # of one line: else they would run into each other
            user = base.sig(median([user_speed(row) or 0 for row in rows]))
            gpu = base.sig(median([(row.tok_s_median or 0) / cards for row in rows]))
            dot = {"series": name, "load": load, "user": user, "gpu": gpu, "number": number, "point": rows[-1].point}
            data.append(dot)
        panels.append(family.panel(data, f"The number at a dot: {AXES[family.axis]}; other lines have the same loads."))
    x = alt.X("user:Q", axis=alt.Axis(title="tokens a second for one user (1 / TPOT)", tickCount=6))
    y = alt.Y("gpu:Q", axis=alt.Axis(title="tokens a second of one GPU", tickCount=6))
    tips = ["series:N", "load:O", "user:Q", "gpu:Q", "point:N"]
    each = base.rows_chart().encode(x=x, y=y)
    line = each.mark_line(strokeWidth=2)
    line = line.encode(color=base.colour("series"), strokeDash=base.dashes(), order="load:Q", tooltip=tips)
    marks = base.dots(each, 60).encode(color=base.colour("series"), tooltip=tips)
    number = each.transform_filter("isValid(datum.number)").mark_text(align="left", dx=7, dy=-6, fontSize=11)
    number = number.encode(text="number:N")
    chart = (line + marks + number).properties(width="container", height=340)
    about = (
        "Further to the right is a faster answer, further up a GPU that serves more; what is above and to the right of "
        "another is better at both. Dashes: plain decoding. On a CPU the machine takes the GPU's place."
    )
    return base.figure("users", "Tokens a second: one user against one GPU", about, chart, panels)


def user_speed(row: Record) -> float | None:
    """Tokens a second that one request gets once its first token is out."""
    if row.tpot_ms:
        return 1000 / row.tpot_ms
    return row.tok_s_median / row.batch if row.tok_s_median and row.batch else None


def gpus(device: str | None) -> int:
    """How many GPUs a machine's name says are in use (`machine.describe`); 1 for one, and for a CPU."""
    count = re.match(r"(\d+)x ", device or "")
    return int(count[1]) if count else 1


def waits(families: Sequence[Family]) -> list[Figure]:
    """Time to first token and time per output token by load: medians, and 99th percentiles."""
    panels = []
    for family in families:
        data = [
            dot | {"what": what} | base.numbers(row, value=f"{what}_ms", low=f"{what}_ms", high=f"{what}_p99_ms")
            for dot, row in family.series()
            for what in WAITS
            if getattr(row, f"{what}_ms") is not None
        ]
        panels.append(family.panel(data))
    tips = ["series:N", "load:O", "value:Q", alt.Tooltip("high:Q", title="p99"), "point:N"]

    def part(what: str, title: str) -> Any:
        tails = base.whiskers(base.load_axis(), xOffset=base.beside(), color=base.colour("series"), tooltip=tips)
        tails = tails.transform_filter(f"datum.what == '{what}' && isValid(datum.high)")
        each = base.rows_chart().transform_filter(f"datum.what == '{what}'")
        each = each.encode(x=base.load_axis(), xOffset=base.beside(), color=base.colour("series"))
        middle = alt.Y("median(value):Q", axis=alt.Axis(title=title), scale=alt.Scale(zero=True))
        line = each.mark_line(strokeWidth=2).encode(y=middle, strokeDash=base.dashes())
        dots = base.dots(each, 60).encode(y=alt.Y("value:Q", scale=alt.Scale(zero=True)), tooltip=tips)
        return (tails + line + dots).properties(width="container", height=210)

    chart = alt.vconcat(*(part(what, title) for what, title in WAITS.items()))
    about = (
        "Lower is better. The dot is the median over requests, the end of the line above it the 99th percentile. "
        "Dashes: plain decoding."
    )
    return base.figure("waits", "What a request waits for, by load", about, chart, panels)


def over_time(points: Sequence[Point]) -> list[Figure]:
    """Each minute of the last repeat of long load tests."""
    panels: dict[tuple[str, str, str], Panel] = {}
    for point in points:
        if not point.arm.get("arrivals") or not point.repeats:
            continue
        minutes = statistics.windows(point.repeats[-1].requests, point.repeats[-1].seconds)
        if len(minutes) < 3:
            continue
        row = tables.row(point)
        for what, title in MINUTES.items():
            data = [
                {"series": base.name_of(row), "minute": minute, "value": base.sig(values[what]), "point": point.id}
                for minute, values in enumerate(minutes, start=1)
                if what in values
            ]
            name = base.short(row), group_title(row), title
            panel = panels.setdefault(name, base.of_rows(f"{name[0]}: {name[1]}", title, [], []))
            panels[name] = replace(panel, data=[*panel.data, *data], points=(*panel.points, point.id))
    x = alt.X("minute:Q", axis=alt.Axis(title="minute", tickMinStep=1))
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=True))
    line = base.rows_chart().encode(x=x, y=y, color=base.colour("series"))
    dots = base.dots(line, 40).encode(tooltip=["series:N", "minute:Q", "value:Q", "point:N"])
    chart = (line.mark_line(strokeWidth=2) + dots).properties(width="container", height=260)
    about = "Every whole minute of the last repeat, by the requests that ended in it."
    return base.figure("over_time", "Over time", about, chart, list(panels.values()))
