"""Figures of speed: speedups, by category of prompts too, throughput and latencies, and where the time goes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import Point
from selfspec_cli.record.quality import PARTS, Profile
from selfspec_cli.record.targets import Target
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure, Panel
from selfspec_cli.report.rows import Group, group_title, label, times

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
            | base.speedup(row)
            | {"text": times(row) + (", slower" if base.slower(row) else "")}
            for name, row in base.named(rows)
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
        named = base.named(rows)
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
    first = ends[0] if len(ends) > 1 else middle
    last = ends[-1] if ends else None
    values = {"first": first, "middle": middle, "last": last, "least": min(present), "most": max(present)}
    text = (f"{middle:,.1f}" if middle >= 10 else f"{middle:.2f}") + f" {unit}"
    rounded = {end: base.sig(value) for end, value in values.items()}
    return {"arm": name, **rounded, "unit": unit, "text": text, "point": row.point}


OF_CATEGORY = ("speedup", "low", "high", "accepted", "tok_step", "requests", "tpot_ms")


def by_category(groups: Iterable[Group], points: Sequence[Point]) -> list[Figure]:
    """Speedup, with its interval, and acceptance of each category of prompts: a dot an arm."""
    by_point: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in tables.category_rows(points):
        if line["speedup"] is not None:
            values = line | {"accepted": next(iter(line["accepted"]), None)}  # of the first draft of a step
            numbers = {name: base.sig(values[name]) for name in OF_CATEGORY}
            by_point[line["point"]].append({"category": line["category"], "point": line["point"]} | numbers)
    panels = []
    for group in groups:
        rows = [row for row in group.rows if row.point in by_point]
        data = [{"series": name} | line for name, row in base.named(rows) for line in by_point[row.point]]
        panels += base.on_machine(group, data, rows)
    scale = alt.Scale(paddingInner=0.5, paddingOuter=0.25)
    y = alt.Y("category:N", sort=None, axis=alt.Axis(title=None, labelLimit=220), scale=scale)
    # Arms stand below each other in each category.
    below = alt.YOffset("series:N", sort=None, scale=alt.Scale(type="point", domain=[base.NAMES]))
    tips = ["series:N", "category:N", *(f"{name}:Q" for name in OF_CATEGORY)]
    each = base.rows_chart().encode(y=y, yOffset=below, color=base.colour("series"), tooltip=tips)
    ends = each.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q")
    speedup = alt.X("speedup:Q", axis=base.times_axis("speedup"), scale=alt.Scale(zero=False))
    share = alt.Axis(title="steps that kept their first draft", format="%", tickCount=6)
    kept = base.dots(each, 60).transform_filter("isValid(datum.accepted)")
    parts = (
        base.unit_line(x="one:Q") + ends + base.dots(each, 60).encode(x=speedup),
        kept.encode(x=alt.X("accepted:Q", axis=share, scale=alt.Scale(domain=[0, 1]))),
    )
    chart = alt.vconcat(*(part.properties(width="container", height=alt.Step(base.STEP)) for part in parts))
    about = (
        "Above: tokens a second of a category's requests over the baseline's, with the 95 % interval. Below: the share "
        "of the steps in which the first draft was accepted. The file of prompts has the categories, and "
        "`selfspec report --by category` prints them."
    )
    return base.figure("categories", "Speedup and acceptance by category", about, chart, panels)


PART_COLOURS = dict(zip(PARTS, [*base.SERIES[: len(PARTS) - 1], base.PLAIN], strict=True))
"""One for each part, in the order in which they stand in a bar."""


def parts(profiles: Sequence[Profile]) -> list[Figure]:
    """A bar an arm, with the share of each part in the wall time; a panel for each model, workload and machine."""
    by_machine: dict[tuple[str, str], list[Profile]] = {}
    for profile in profiles:
        by_machine.setdefault((profile.device, group_title(tables.of_arm(profile.arm))), []).append(profile)
    panels = []
    for (device, title), members in by_machine.items():
        data: list[dict[str, Any]] = []
        for profile in sorted(members, key=lambda profile: profile.arm["arm"] != "baseline")[: base.LONGEST]:
            name = label(tables.of_arm(profile.arm))
            number = f"{profile.tok_s:.1f} tok/s"
            for order, part in enumerate(part for part in PART_COLOURS if part in profile.seconds):
                seconds = profile.seconds[part]
                shares = {"share": base.sig(seconds / profile.wall), "ms": base.sig(1000 * seconds / profile.rounds)}
                text = number if order == 0 else ""
                data.append({"arm": name, "part": part, "what": PARTS[part], "order": order, "text": text} | shares)
        panels.append(Panel(device, title, data))
    scale = alt.Scale(domain=list(PART_COLOURS), range=list(PART_COLOURS.values()))
    legend = alt.Legend(title=None, orient="bottom", columns=4)
    colour = alt.Color("part:N", sort=list(PART_COLOURS), scale=scale, legend=legend)
    x = alt.X("share:Q", stack=True, axis=alt.Axis(title="share of the wall time", format="%", tickCount=6))
    tips = ["arm:N", "part:N", "what:N", alt.Tooltip("share:Q", format=".1%"), alt.Tooltip("ms:Q", title="ms a round")]
    titles = base.titles_above().transform_filter("datum.order == 0")
    bars = base.bars(x, tips, color=colour, order="order:Q")
    chart = (bars + titles).properties(width="container", height=alt.Step(base.STEP))
    about = (
        "Under PyTorch's profiler, every moment of a run counts as one part: on a GPU that of the kernel that runs, "
        "and while none runs, what the host does. The number is the speed without the profiler, which slows the host."
    )
    return base.figure("profile", "Where the time goes", about, chart, panels)
