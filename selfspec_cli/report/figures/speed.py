"""Figures of speed: speedups, throughput and latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record.columns import Record
from selfspec_cli.record.targets import Target
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.rows import Group, times

MEASURES = (
    ("tokens a second: slowest, median and fastest repeat", "tok/s", ("tok_s_median", "tok_s_min", "tok_s_max")),
    ("time to first token (TTFT, ms): median and 99th percentile", "ms", ("ttft_ms", "ttft_p99_ms")),
    ("time per output token (TPOT, ms): median and 99th percentile", "ms", ("tpot_ms", "tpot_p99_ms")),
    ("time between outputs (ITL, ms): median", "ms", ("itl_ms",)),
    ("time to the last token (E2E, ms): median and 99th percentile", "ms", ("e2e_ms", "e2e_p99_ms")),
)
"""Panels of throughput and latency: title, unit, and columns, the median first."""


def speedups(groups: Iterable[Group], targets: Sequence[Target]) -> list[Figure]:
    """One bar an arm, with its interval and its target."""
    panels = []
    for group in groups:
        rows = base.measured(group)
        data = [
            {"arm": name, "slower": base.slower(row), "target": _target(row, targets)}
            | base.numbers(row, speedup="speedup", low="speedup_low", high="speedup_high", tok_s="tok_s_median")
            | {"text": times(row) + (", slower" if base.slower(row) else "")}
            for name, row in zip(base.labels(rows), rows, strict=True)
        ]
        if any(row.arm != "baseline" for row in rows):
            most = f"The {base.LONGEST} fastest of {len(data)} arms are drawn; the table below has all of them."
            note = most if len(data) > base.LONGEST else group.headline
            panels.append(base.of_rows(base.short(rows[0]), group.title, data[: base.LONGEST], rows, note))
    x = alt.X("speedup:Q", axis=base.times_axis("tokens a second over the baseline's"), scale=alt.Scale(zero=True))
    tips = ["arm:N", "speedup:Q", "low:Q", "high:Q", "tok_s:Q", "target:Q", "point:N"]
    wish = base.rows_chart().transform_filter("isValid(datum.target)")
    wish = wish.mark_point(shape="diamond", size=90, filled=True, color="#a54fd1", yOffset=4)
    wish = wish.encode(x="target:Q", y=base.arm_axis(), tooltip=tips)
    one = base.rows_chart().transform_calculate(one="1").mark_tick(size=19, thickness=1.5, yOffset=4)
    one = one.encode(x="one:Q", y=base.arm_axis())  # beside each bar, so that no line goes through the names
    chart = base.by_arm(base.bars(x, tips, color=base.colour("arm", legend=False)), one, base.spans(tips), wish)
    about = (
        "Each bar is the median of an arm's repeats over the median of its baseline's; the line across its end is the "
        "95 % interval by bootstrap over the repeats of both sides. No line: repeats were not kept, so nothing says "
        "how sure the figure is. Red: slower, with the whole interval below 1. Grey: plain decoding, and vLLM's own "
        "methods. `skip` does not verify its drafts. A diamond is a target that the experiment states."
    )
    return base.figure("speedup", "Speedup over the same model without drafting", about, chart, panels)


def _target(row: Record, targets: Sequence[Target]) -> float | None:
    least = [target.values["speedup"][0] for target in targets if "speedup" in target.values and target.is_for(row)]
    return base.sig(least[0]) if least else None


def throughput(groups: Iterable[Group]) -> list[Figure]:
    """Tokens a second, and the percentiles of each latency, one line an arm."""
    panels = []
    for group in groups:
        rows = base.measured(group)[: base.LONGEST]
        named = list(zip(base.labels(rows), rows, strict=True))
        where = f"{group.title}, {base.short(rows[0])}" if rows else ""
        for meaning, unit, columns in MEASURES:
            shown = [(name, row) for name, row in named if getattr(row, columns[0]) is not None]
            data = [_span(name, row, columns, unit) for name, row in shown]
            panels.append(base.of_rows(where, meaning, data, rows))
    tips = ["arm:N", "first:Q", "middle:Q", "last:Q", "unit:N", "point:N"]
    x = alt.X("middle:Q", axis=alt.Axis(title=None, tickCount=6), scale=alt.Scale(zero=True))
    each = base.rows_chart().encode(y=base.arm_axis(), color=base.colour("arm", legend=False), tooltip=tips)
    span = each.mark_rule(strokeWidth=4, opacity=0.55, yOffset=4).encode(x="least:Q", x2="most:Q")
    ticks = each.transform_filter("isValid(datum.last)").mark_tick(thickness=2.5, size=12, yOffset=4).encode(x="last:Q")
    centre = each.mark_point(filled=True, size=90, yOffset=4, opacity=1).encode(x=x)
    chart = base.by_arm(span, ticks, centre)
    about = (
        "Tokens a second over all requests together, and what one request waits for. The dot is the median; the end of "
        "the line is the 99th percentile, or the fastest repeat. Percentiles are over the requests of all repeats, by "
        "the definitions of vLLM's own benchmark."
    )
    return base.figure("latency", "Throughput and latency", about, chart, panels)


def _span(name: str, row: Record, columns: Sequence[str], unit: str) -> dict[str, Any]:
    """An arm's median, and the ends of its range that the other columns give."""
    middle, *ends = (getattr(row, column) for column in columns)
    present = [value for value in (middle, *ends) if value is not None]
    return {
        "arm": name,
        "first": base.sig(ends[0] if len(ends) > 1 else middle),
        "middle": base.sig(middle),
        "last": base.sig(ends[-1]) if ends else None,
        "least": base.sig(min(present)),
        "most": base.sig(max(present)),
        "unit": unit,
        "text": (f"{middle:,.1f}" if middle >= 10 else f"{middle:.2f}") + f" {unit}",
        "point": row.point,
    }
