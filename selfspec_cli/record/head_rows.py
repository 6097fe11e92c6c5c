"""The comparison of exit heads as data: a row a head, kept in heads.csv and heads.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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
    k = best_k; min and max over the repeats, low and high the ends of the 95 % interval. efficiency: measured over
    predicted. Three ratios say where it comes from; their product is close to it, for they use the median time between
    tokens, not the speed of whole repeats: tokens_ratio (tokens a round, measured over predicted), round_ratio (time of
    a round, predicted over measured), baseline_ratio (the baseline's step when the head was measured, over T: how the
    machine drifted between).
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
    measured_low: float | None = None
    measured_high: float | None = None

    @classmethod
    def of(cls, model: str, report: dict[str, Any]) -> HeadRow:
        """The row of one of `fit.run`'s reports, with no prediction in it yet."""
        names = {column.name for column in fields(cls)}
        values = {name: value for name, value in report.items() if name in names}
        file = {"path": Path(values["path"]).name} if values.get("path") else {}
        return cls(model=model, E=report["layer"], **(values | file))

    @property
    def tokens(self) -> dict[int, float]:
        """k -> tokens a round; empty without a replay."""
        by_length = {k: getattr(self, f"tokens_k{k}") for k in LENGTHS}
        return {k: value for k, value in by_length.items() if value is not None}

    @property
    def label(self) -> str:
        """In a few words, for tables and figures."""
        return f"E={self.E} {self.head}" + (f" V'={self.vocab}" if self.vocab != "full" else "")


def by_speedup(rows: list[HeadRow]) -> list[HeadRow]:
    """Rows with a prediction, the most promising first."""
    return sorted((row for row in rows if row.predicted_speedup is not None), key=lambda r: -(r.predicted_speedup or 0))


def load(document: dict[str, Any]) -> list[HeadRow]:
    """The rows of a heads.json; columns that this version does not know are left out."""
    names = {column.name for column in fields(HeadRow)}
    return [HeadRow(**{name: value for name, value in row.items() if name in names}) for row in document["rows"]]
