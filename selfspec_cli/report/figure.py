"""The bar chart: speedup over the baseline, one bar an arm, one panel a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfspec_cli.record.tables import Record
from selfspec_cli.report.rows import groups, interval, label, target_for

INK, MUTED, BASE, ARM, LOSSY, TARGET = "#1f2933", "#6b7785", "#a7b1bc", "#2f6fb3", "#b9803a", "#c23b4b"
BAR = 0.62  # of the distance between bars
INCHES_A_BAR = 0.46


def draw(rows: list[Record], path: str | Path, footer: str = "") -> Path | None:
    """Write the chart as PNG; None where no arm has a speedup.

    Args:
        footer: machine, date and versions, in small print.
    """
    found = [(group.title, [row for row in group.rows if row.speedup is not None]) for group in groups(rows)]
    panels = [(title, members) for title, members in found if members]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(members) * INCHES_A_BAR + 1.15 for _, members in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10.8, sum(heights) + 0.7), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, members) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, title, members)
    figure.suptitle("Speedup over the same model without drafting", x=0.012, ha="left", fontsize=14, color=INK)
    figure.supxlabel(footer, x=0.012, ha="left", fontsize=7.5, color=MUTED)
    return save(figure, path)


def save(figure: Any, path: str | Path) -> Path:
    """Write a figure as PNG, its folder too, and let go of it."""
    from matplotlib import pyplot

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.2)
    pyplot.close(figure)
    return path


def _panel(axis: Any, title: str, members: list[Record]) -> None:
    furthest = 1.0
    for place, row in enumerate(members):
        speedup, pair, target = row.speedup or 0, interval(row), target_for(row)
        axis.barh(place, speedup, height=BAR, color=_colour(row), zorder=2)
        if pair:
            reach = [[max(speedup - pair[0], 0)], [max(pair[1] - speedup, 0)]]
            axis.errorbar(speedup, place, xerr=reach, fmt="none", ecolor=INK, elinewidth=1.1, capsize=3.5, zorder=4)
        if target:
            axis.plot(target.speedup, place, marker="D", markersize=6, color=TARGET, zorder=5, linestyle="none")
        furthest = max(furthest, speedup, *(pair or ()), target.speedup if target else 0)
    axis.axvline(1.0, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=3)
    _columns(axis, members)
    axis.set_yticks(range(len(members)), [label(row) for row in members], fontsize=9.5)
    axis.set_ylim(len(members) - 0.4, -0.6)
    axis.set_xlim(0, furthest * 1.06)
    axis.set_title(title, loc="left", fontsize=10, color=MUTED, pad=15)  # above the columns' names
    axis.set_xlabel(_axis_label(members), fontsize=8.5, color=MUTED, loc="left")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.tick_params(length=0, labelcolor=MUTED)
    axis.tick_params(axis="y", labelcolor=INK)
    axis.grid(axis="x", color="#e4e8ec")
    axis.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)


def _columns(axis: Any, members: list[Record]) -> None:
    """Figures to the right of the bars, aligned, so that none of them collides with a whisker."""
    columns: list[tuple[str, list[str]]] = [
        ("speedup", [f"{row.speedup:.2f}x" for row in members]),
        ("tok/s", [f"{row.tok_s_median:,.0f}" if row.tok_s_median else "" for row in members]),
        ("accepted", [f"{row.accept_rate:.0%}" if row.accept_rate is not None else "" for row in members]),
        ("ΔPPL", [f"{row.delta_ppl:+.2f}" if row.delta_ppl is not None else "" for row in members]),
    ]
    right = 1.0
    for name, texts in columns:
        if not any(texts):
            continue
        right += 0.125
        axis.text(right, 1.0, name, transform=axis.transAxes, ha="right", va="bottom", fontsize=8.5, color=MUTED)
        for place, text in enumerate(texts):
            weight = "bold" if name == "speedup" else "normal"
            axis.text(right, place, text, transform=axis.get_yaxis_transform(), ha="right", va="center_baseline",
                      fontsize=9.5, color=INK, weight=weight)  # fmt: skip


def _colour(row: Record) -> str:
    return {"baseline": BASE, "skip": LOSSY}.get(row.arm, ARM)


def _axis_label(members: list[Record]) -> str:
    repeats = sorted({row.repeats for row in members if row.repeats})
    counted = f" of {repeats[0]} repeats" if len(repeats) == 1 else ""
    arms = [row for row in members if row.arm != "baseline"]
    whisker = "whisker: 95 % interval" if any(interval(row) for row in arms) else "no whisker: repeats were not kept"
    parts = [f"bar: median{counted}, {whisker}"] if arms else [f"bar: median{counted}"]
    parts += ["red diamond: target"] if any(target_for(row) for row in members) else []
    parts += ["brown: not verified, lossy"] if any(row.arm == "skip" for row in members) else []
    return "   ·   ".join(parts)
