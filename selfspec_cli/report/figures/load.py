"""Figures of load tests: what is served and what is waited for as more is asked, over time, and by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli import load_patterns
from selfspec_cli.record import categories as by_category
from selfspec_cli.record import latency, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import OK, Point
from selfspec_cli.record.tables import asked
from selfspec_cli.report.figures.base import (
    STEP,
    Figure,
    Panel,
    below,
    colour,
    figure,
    labels,
    lines,
    of_rows,
    on_machine,
    rows_chart,
    short,
    sig,
    times_axis,
)
from selfspec_cli.report.rows import Group, label, latest, task

CURVES = {
    "tok_s_median": "tokens a second",
    "req_s": "requests that end in a second",
    "goodput": "requests a second that keep the limits",
    "ttft_p99_ms": "time to first token (TTFT, ms), 99th percentile",
    "tpot_p99_ms": "time per output token (TPOT, ms), 99th percentile",
    "e2e_p99_ms": "time to the last token (E2E, ms), 99th percentile",
    "failed_requests": "requests that failed",
}
PARTS = {"tok_s": "tokens a second", "ttft": "TTFT p99, ms", "tpot": "TPOT p99, ms"}


def curves(rows: Iterable[Record]) -> list[Figure]:
    """Throughput and 99th percentiles by the number of clients or the rate, one line an arm."""
    families: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in latest(rows):
        if row.arrivals is not None and row.status == OK:
            families[_family(row)].append(row)
    panels = []
    for members in families.values():
        column = "clients" if members[0].clients is not None else "rate"
        if len({getattr(row, column) for row in members}) < 2:
            continue
        ordered = sorted(members, key=lambda row: getattr(row, column) or 0)
        for name, meaning in CURVES.items():
            data = [
                {
                    "series": label(row),
                    "load": sig(getattr(row, column), 4),
                    "value": sig(getattr(row, name)),
                    "asked": asked(row),
                    "point": row.point,
                }
                for row in ordered
                if getattr(row, name) is not None
            ]
            title = f"{meaning}, by {'clients' if column == 'clients' else 'requests that arrive in a second'}"
            if any(dot["value"] for dot in data):
                panels.append(of_rows(_where(members[0]), title, data, members))
    x = alt.X("load:Q", axis=alt.Axis(title="clients, or requests a second"), scale=alt.Scale(type="sqrt"))
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=True))
    tips = ["series:N", "asked:N", "value:Q", "point:N"]
    chart = lines(x, y, tips, 70).properties(width="container", height=300)
    about = (
        "A closed loop keeps each client at one request; in an open loop requests arrive whether or not others have "
        "ended, and a server that is asked for more than it can do falls behind. Percentiles are over the requests of "
        "all runs, by the definitions of vLLM's own benchmark."
    )
    return figure("load", "Throughput and tails under load", about, chart, panels)


def over_time(points: Sequence[Point]) -> list[Figure]:
    """Each minute of the last run of long load tests: does what is served stay what it was?"""
    by_family: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    names: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for point in points:
        if not point.arm.get("arrivals") or not point.repeats:
            continue
        windows = latency.windows(point.repeats[-1].requests, point.repeats[-1].seconds)
        if len(windows) < 3:
            continue
        row = tables.row(point)
        family = (*_family(row), asked(row))
        names[family].append(point.id)
        for minute, values in enumerate(windows, start=1):
            for name, value in values.items():
                data = {"series": label(row), "minute": minute, "value": sig(value), "point": point.id}
                by_family[family][name].append(data)
    panels = [
        Panel(f"{family[0]}, {family[2]}: {family[-1]}", PARTS[name], data, tuple(names[family]))
        for family, by_name in by_family.items()
        for name, data in by_name.items()
    ]
    x = alt.X("minute:Q", axis=alt.Axis(title="minute", tickMinStep=1))
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=True))
    tips = ["series:N", "minute:Q", "value:Q", "point:N"]
    chart = lines(x, y, tips, 40).properties(width="container", height=260)
    about = "Every whole minute of the last run, by the requests that ended in it."
    return figure("over_time", "Over time", about, chart, panels)


def categories(groups: Iterable[Group], points: Sequence[Point]) -> list[Figure]:
    """Speedup, with its interval, and acceptance of each category of prompts: a dot an arm."""
    by_point: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in by_category.rows(points):
        if line["speedup"] is not None:
            numbers = {name: sig(line[name]) for name in ("speedup", "low", "high", "tpot_ms", "tok_step")}
            accepted = sig(line["accepted"][0]) if line["accepted"] else None
            shown = {"category": line["category"], "accepted": accepted, "requests": line["requests"]}
            by_point[line["point"]].append(shown | numbers | {"point": line["point"]})
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.point in by_point]
        named = zip(labels(rows), rows, strict=True)
        panels += on_machine(
            group, [{"series": name} | line for name, row in named for line in by_point[row.point]], rows
        )
    y = alt.Y(
        "category:N",
        sort=None,
        axis=alt.Axis(title=None, labelLimit=220),
        scale=alt.Scale(paddingInner=0.5, paddingOuter=0.25),
    )
    tips = [
        "series:N",
        "category:N",
        "speedup:Q",
        "low:Q",
        "high:Q",
        "accepted:Q",
        "tok_step:Q",
        "requests:Q",
        "tpot_ms:Q",
    ]
    each = rows_chart().encode(y=y, yOffset=below(), color=colour("series"), tooltip=tips)
    dots = each.mark_point(filled=True, size=60, opacity=1)
    ends = each.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q")
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(x="one:Q")
    speedup = alt.X("speedup:Q", axis=times_axis("speedup"), scale=alt.Scale(zero=False))
    share = alt.Axis(title="steps that kept their first draft", format="%", tickCount=6)
    kept = dots.transform_filter("isValid(datum.accepted)")
    parts = (
        one + ends + dots.encode(x=speedup),
        kept.encode(x=alt.X("accepted:Q", axis=share, scale=alt.Scale(domain=[0, 1]))),
    )
    chart = alt.vconcat(*(part.properties(width="container", height=alt.Step(STEP)) for part in parts))
    about = (
        "Above: tokens a second of a category's requests over the baseline's, with the 95 % interval. Below: the share "
        "of the steps in which the first draft was accepted. The file of prompts has the categories, and "
        "`selfspec report --by category` prints them."
    )
    return figure("categories", "Speedup and acceptance by category", about, chart, panels)


def _family(row: Record) -> tuple[Any, ...]:
    """What rows have in common that belong on one chart."""
    load = "clients" if row.clients is not None else "rate"
    return (
        row.model,
        row.device,
        row.workload,
        row.output_len,
        row.temperature,
        load,
        load_patterns.comparable(row, without=("clients", "rate", "load_share")),
    )


def _where(row: Record) -> str:
    return f"{task(row)}, {short(row)}"
