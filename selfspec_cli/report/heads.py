"""The comparison of exit heads as a table for the terminal and a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.record.head_rows import HeadRow, by_speedup
from selfspec_cli.report.figure import INK, MUTED


def table(rows: list[HeadRow], most: int = 20) -> Table:
    """The most promising rows for the terminal."""
    made = Table(title="Exit heads, by predicted speedup", title_justify="left")
    for name in (
        "exit, head",
        "agreement",
        "generated",
        "k",
        "tokens",
        "KiB a step",
        "head µs",
        "predicted",
        "measured",
    ):
        made.add_column(name, justify="left" if name == "exit, head" else "right", no_wrap=True)
    for row in (by_speedup(rows) or rows)[:most]:
        measured = "" if row.measured_speedup is None else f"{row.measured_speedup:.2f}x"
        if row.measured_low is not None and row.measured_high is not None:
            measured += f" ({row.measured_low:.2f}–{row.measured_high:.2f})"
        made.add_row(
            row.label, _share(row.agreement), _share(row.agreement_generated), str(row.best_k or ""),
            "" if row.best_k is None else f"{row.tokens[row.best_k]:.2f}", f"{(row.bytes_per_step or 0) / 1024:,.0f}",
            "" if row.head_us is None else f"{row.head_us:,.0f}",
            "" if row.predicted_speedup is None else f"{row.predicted_speedup:.2f}x", measured,
        )  # fmt: skip
    return made


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def draw(rows: list[HeadRow], path: Path) -> str:
    """Two panels: agreement with the full model by exit layer, and predicted speedup at each head's best k.

    Returns the path that was written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    names = list(dict.fromkeys(row.head for row in rows))
    colours = colours_of(names)
    for axis, column, title in (
        (axes[0], "agreement_generated", "agreement with the full model on its own generations"),
        (axes[1], "predicted_speedup", "predicted speedup at the best k; crosses: measured"),
    ):
        if all(getattr(row, column) is None for row in rows):
            column = "agreement"
        for name, vocab in ((name, v) for name in names for v in dict.fromkeys(r.vocab for r in rows)):
            members = [
                row for row in rows if (row.head, row.vocab) == (name, vocab) and getattr(row, column) is not None
            ]
            axis.plot([row.E for row in members], [getattr(row, column) for row in members], marker="o", markersize=3.5,
                      color=colours[name], linestyle="-" if vocab == "full" else ":", linewidth=1.3,
                      label=name if vocab == "full" else None)  # fmt: skip
            measured = [row for row in members if column == "predicted_speedup" and row.measured_speedup is not None]
            axis.plot([row.E for row in measured], [row.measured_speedup for row in measured], linestyle="none",
                      marker="x", color=colours[name], markersize=8)  # fmt: skip
        axis.set_title(title, loc="left", fontsize=10, color=MUTED)
        axis.set_xlabel("exit layer E", color=INK)
        axis.set_xticks(sorted({row.E for row in rows}))
        axis.grid(color="#e4e8ec")
    axes[0].legend(fontsize=7.5, frameon=False, title="dotted: draft vocabulary", title_fontsize=7.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)
    return str(path)


def colours_of(names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each head by its short name: that of its kind, lighter for each further head of one kind."""
    from matplotlib.colors import to_rgb

    found: dict[str, tuple[float, float, float]] = {}
    seen: Counter[str] = Counter()
    for name in names:
        kind = HeadSpec.from_name(name).kind
        lighter = min(0.8, 0.16 * seen[kind])
        red, green, blue = (part + (1 - part) * lighter for part in to_rgb(HEADS[kind].colour))
        found[name] = (red, green, blue)
        seen[kind] += 1
    return found
