"""The comparison of exit heads: its rows, and the table, CSV, JSON and figure made of them. Pure but for writing."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from selfspec_cli.report.figure import INK, MUTED

LENGTHS = range(1, 9)


@dataclass
class HeadRow:
    """One head at one exit layer over one draft vocabulary. What was not measured is None.

    agreement: share of held-out text where its argmax is the full model's; agreement_generated: the same on the full
    model's own generations. tokens_k*: tokens a round of k drafts yields there, the verify step's included.
    path: its file in the folder of heads. parameters: weights that the head stores. bytes_per_step: of weights, read by
    the head in a draft step. head_us: microseconds of it. pairs, ridge, residual, explained, condition: of the fit
    (`fitting.FitReport`).
    predicted_speedup: at best_k, by the cost model with step times measured on this machine. measured_*: in the engine,
    k = best_k; min and max over the repeats. efficiency: measured over predicted. Three ratios say where it comes from;
    their product is close to it, for they use the median time between tokens, not the speed of whole repeats:
    tokens_ratio (tokens a round, measured over predicted), round_ratio (time of a round, predicted over measured),
    baseline_ratio (the baseline's step when the head was measured, over T: how the machine drifted between).
    """

    model: str
    E: int
    head: str
    vocab: str
    agreement: float | None = None
    agreement_generated: float | None = None
    tokens_k1: float | None = None
    tokens_k2: float | None = None
    tokens_k3: float | None = None
    tokens_k4: float | None = None
    tokens_k5: float | None = None
    tokens_k6: float | None = None
    tokens_k7: float | None = None
    tokens_k8: float | None = None
    parameters: int | None = None
    bytes_per_step: int | None = None
    head_us: float | None = None
    pairs: int | None = None
    ridge: float | None = None
    residual: float | None = None
    explained: float | None = None
    condition: float | None = None
    best_k: int | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    measured_min: float | None = None
    measured_max: float | None = None
    measured_tokens: float | None = None
    efficiency: float | None = None
    tokens_ratio: float | None = None
    round_ratio: float | None = None
    baseline_ratio: float | None = None
    path: str | None = None

    @classmethod
    def of(cls, model: str, report: dict[str, Any]) -> HeadRow:
        """The row of one of `fit.run`'s reports, with no prediction in it yet."""
        known = {column.name for column in fields(cls)}
        values = {name: value for name, value in report.items() if name in known}
        file = {"path": Path(values["path"]).name} if values.get("path") else {}
        return cls(model=model, E=report["layer"], **(values | file))

    @property
    def tokens(self) -> dict[int, float]:
        """k -> tokens a round; empty without a replay."""
        found = {k: getattr(self, f"tokens_k{k}") for k in LENGTHS}
        return {k: value for k, value in found.items() if value is not None}

    @property
    def label(self) -> str:
        """In a few words, for tables and figures."""
        return f"E={self.E} {self.head}" + (f" V'={self.vocab}" if self.vocab != "full" else "")


def by_speedup(rows: list[HeadRow]) -> list[HeadRow]:
    """Rows with a prediction, the most promising first."""
    return sorted((row for row in rows if row.predicted_speedup is not None), key=lambda r: -(r.predicted_speedup or 0))


def write(rows: list[HeadRow], facts: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write heads.csv, heads.json (rows and facts) and heads.png; returns name -> path."""
    folder.mkdir(parents=True, exist_ok=True)
    table, document, chart = folder / "heads.csv", folder / "heads.json", folder / "heads.png"
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in fields(HeadRow)])
        for row in rows:
            writer.writerow([_cell(getattr(row, column.name)) for column in fields(HeadRow)])
    document.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    draw(rows, chart)
    return {"csv": str(table), "json": str(document), "figure": str(chart)}


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


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
        if row.measured_min is not None and row.measured_max is not None:
            measured += f" ({row.measured_min:.2f}–{row.measured_max:.2f})"
        made.add_row(
            row.label, _share(row.agreement), _share(row.agreement_generated), str(row.best_k or ""),
            "" if row.best_k is None else f"{row.tokens[row.best_k]:.2f}", f"{(row.bytes_per_step or 0) / 1024:,.0f}",
            "" if row.head_us is None else f"{row.head_us:,.0f}",
            "" if row.predicted_speedup is None else f"{row.predicted_speedup:.2f}x", measured,
        )  # fmt: skip
    return made


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def draw(rows: list[HeadRow], path: Path) -> None:
    """Two panels: agreement with the full model by exit layer, and predicted speedup at each head's best k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    names = list(dict.fromkeys(row.head for row in rows))
    colours = pyplot.get_cmap("tab10")
    for axis, column, title in (
        (axes[0], "agreement_generated", "agreement with the full model on its own generations"),
        (axes[1], "predicted_speedup", "predicted speedup at the best k; crosses: measured"),
    ):
        if all(getattr(row, column) is None for row in rows):
            column = "agreement"
        for (number, name), vocab in (
            (pair, v) for pair in enumerate(names) for v in dict.fromkeys(r.vocab for r in rows)
        ):
            members = [
                row for row in rows if (row.head, row.vocab) == (name, vocab) and getattr(row, column) is not None
            ]
            axis.plot([row.E for row in members], [getattr(row, column) for row in members], marker="o", markersize=3.5,
                      color=colours(number % 10), linestyle="-" if vocab == "full" else ":", linewidth=1.3,
                      label=name if vocab == "full" else None)  # fmt: skip
            measured = [row for row in members if column == "predicted_speedup" and row.measured_speedup is not None]
            axis.plot([row.E for row in measured], [row.measured_speedup for row in measured], linestyle="none",
                      marker="x", color=colours(number % 10), markersize=8)  # fmt: skip
        axis.set_title(title, loc="left", fontsize=10, color=MUTED)
        axis.set_xlabel("exit layer E", color=INK)
        axis.set_xticks(sorted({row.E for row in rows}))
        axis.grid(color="#e4e8ec")
    axes[0].legend(fontsize=7.5, frameon=False, title="dotted: draft vocabulary", title_fontsize=7.5)
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)
