"""Figures of speed: speedups, throughput and latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record.columns import Record
from selfspec_cli.record.targets import Target
from selfspec_cli.report.figures.base import (
    LONGEST,
    Figure,
    arm_axis,
    bars,
    by_arm,
    colour,
    figure,
    labels,
    measured,
    of_rows,
    rows_chart,
    short,
    sig,
    slower,
    spans,
    times_axis,
)
from selfspec_cli.report.rows import Group, times

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between outputs",
    "e2e": "time to the last token",
}


def speedups(groups: Iterable[Group], targets: Sequence[Target]) -> list[Figure]:
    """One bar an arm, with its interval and its target."""
    panels = []
    for group in groups:
        rows = measured(group)
        data = [
            {
                "arm": name,
                "slower": slower(row),
                "speedup": sig(row.speedup),
                "low": sig(row.speedup_low),
                "high": sig(row.speedup_high),
                "tok_s": sig(row.tok_s_median),
                "point": row.point,
                "text": _times(row),
                "target": _target(row, targets),
            }
            for name, row in zip(labels(rows), rows, strict=True)
        ]
        if any(row.arm != "baseline" for row in rows):
            note = _left_out(len(data)) or group.headline
            panels.append(of_rows(short(rows[0]), group.title, data[:LONGEST], rows, note))
    x = alt.X("speedup:Q", axis=times_axis("tokens a second over the baseline's"), scale=alt.Scale(zero=True))
    tips = ["arm:N", "speedup:Q", "low:Q", "high:Q", "tok_s:Q", "target:Q", "point:N"]
    wish = (
        rows_chart()
        .transform_filter("isValid(datum.target)")
        .mark_point(shape="diamond", size=90, filled=True, color="#a54fd1", yOffset=4)
        .encode(x="target:Q", y=arm_axis(), tooltip=tips)
    )
    one = rows_chart().transform_calculate(one="1").mark_tick(size=19, thickness=1.5, yOffset=4)
    one = one.encode(x="one:Q", y=arm_axis())  # beside each bar, so that no line goes through the names
    chart = by_arm(bars(x, tips, color=colour("arm", legend=False)), one, spans(tips), wish)
    about = (
        "Each bar is the median of an arm's repeats over the median of its baseline's; the line across its end is the "
        "95 % interval by bootstrap over the repeats of both sides. No line: repeats were not kept, so nothing says "
        "how sure the figure is. Red: slower, with the whole interval below 1. Grey: plain decoding, and vLLM's own "
        "methods. `skip` does not verify its drafts. A diamond is a target that the experiment states."
    )
    return figure("speedup", "Speedup over the same model without drafting", about, chart, panels)


def _times(row: Record) -> str:
    return times(row) + (", slower" if slower(row) else "")


def _target(row: Record, targets: Sequence[Target]) -> float | None:
    least = [target.values["speedup"][0] for target in targets if "speedup" in target.values and target.is_for(row)]
    return sig(least[0]) if least else None


def _left_out(count: int) -> str:
    text = f"The {LONGEST} fastest of {count} arms are drawn; the table below has all of them."
    return text if count > LONGEST else ""


def throughput(groups: Iterable[Group]) -> list[Figure]:
    """Tokens a second, and the percentiles of each latency, one line an arm."""
    panels = []
    for group in groups:
        rows = measured(group)[:LONGEST]
        named = list(zip(labels(rows), rows, strict=True))
        where = f"{group.title}, {short(rows[0])}" if rows else ""
        speeds = [
            _percentiles(name, row, (row.tok_s_min, row.tok_s_median, row.tok_s_max), "tok/s") for name, row in named
        ]
        panels.append(of_rows(where, "tokens a second: slowest, median and fastest repeat", _known(speeds), rows))
        for column, meaning in LATENCIES.items():
            percentiles = [
                _percentiles(name, row, tuple(getattr(row, f"{column}{part}_ms", None) for part in ("", "_p99")), "ms")
                for name, row in named
            ]
            title = f"{meaning} ({column.upper()}, ms): median" + ("" if column == "itl" else " and 99th percentile")
            panels.append(of_rows(where, title, _known(percentiles), rows))
    tips = ["arm:N", "first:Q", "middle:Q", "last:Q", "unit:N", "point:N"]
    x = alt.X("middle:Q", axis=alt.Axis(title=None, tickCount=6), scale=alt.Scale(zero=True))
    each = rows_chart().encode(y=arm_axis(), color=colour("arm", legend=False), tooltip=tips)
    span = each.mark_rule(strokeWidth=4, opacity=0.55, yOffset=4).encode(x="least:Q", x2="most:Q")
    ticks = each.transform_filter("isValid(datum.last)").mark_tick(thickness=2.5, size=12, yOffset=4).encode(x="last:Q")
    centre = each.mark_point(filled=True, size=90, yOffset=4, opacity=1).encode(x=x)
    chart = by_arm(span, ticks, centre)
    about = (
        "Tokens a second over all requests together, and what one request waits for. The dot is the median; the end of "
        "the line is the 99th percentile, or the fastest repeat. Percentiles are over the requests of all repeats, by "
        "the definitions of vLLM's own benchmark."
    )
    return figure("latency", "Throughput and latency", about, chart, panels)


def _percentiles(name: str, row: Record, values: tuple[Any, ...], unit: str) -> dict[str, Any] | None:
    middle = values[1] if unit == "tok/s" else values[0]
    if middle is None:
        return None
    present = [value for value in values if value is not None]
    text = f"{middle:,.1f}" if middle >= 10 else f"{middle:.2f}"
    return {
        "arm": name,
        "first": sig(values[0]),
        "middle": sig(middle),
        "last": sig(values[-1]),
        "least": sig(min(present)),
        "most": sig(max(present)),
        "unit": unit,
        "text": f"{text} {unit}",
        "point": row.point,
    }


def _known(found: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [one for one in found if one is not None]
