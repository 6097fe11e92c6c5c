"""The comparison of exit heads as a table for the terminal, and as a figure beside heads.csv."""

from pathlib import Path

from rich.table import Table

from selfspec_cli.record.head_rows import HeadRow, by_speedup

NAMES = ("exit, head", "agreement", "generated", "k", "tokens", "KiB a step", "head µs", "predicted", "measured")


def table(rows: list[HeadRow], most: int = 20) -> Table:
    """The most promising rows for the terminal."""
    made = Table(title="Exit heads, by predicted speedup", title_justify="left")
    for name in NAMES:
        made.add_column(name, justify="left" if name == "exit, head" else "right", no_wrap=True)
    for row in (by_speedup(rows) or rows)[:most]:
        measured = "" if row.measured_speedup is None else f"{row.measured_speedup:.2f}x"
        if row.measured_low is not None and row.measured_high is not None:
            measured += f" ({row.measured_low:.2f}–{row.measured_high:.2f})"
        made.add_row(
            row.label,
            _share(row.agreement),
            _share(row.agreement_generated),
            str(row.best_k or ""),
            "" if row.best_k is None else f"{row.tokens[row.best_k]:.2f}",
            f"{(row.bytes_per_step or 0) / 1024:,.0f}",
            "" if row.head_us is None else f"{row.head_us:,.0f}",
            "" if row.predicted_speedup is None else f"{row.predicted_speedup:.2f}x",
            measured,
        )
    return made


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def draw(rows: list[HeadRow], path: str | Path) -> str | None:
    """Agreement, or predicted speedup where there is one, by exit layer; the path written, None without rows."""
    from selfspec_cli.report import export
    from selfspec_cli.report.figures import exits

    for figure in exits.heads({rows[0].model: rows} if rows else {}):
        return str(export.png(figure, figure.panels[-1], path))
    return None
