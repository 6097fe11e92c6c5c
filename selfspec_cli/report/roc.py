"""ROC curves of the gates: how well each statistic tells drafts that stand from drafts that fall. Logs in, figures out.

The positive class is "the verifier took this token". Two questions are asked of each gate. In the draft: of every
drafted token, which stands only if all before it do; it passes a gate that was open on it and on all before it, so its
score is the lowest so far. At stake: of those tokens alone whose predecessors were right, by their own statistic.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit import gates
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gate_rules import FEATURES, GATE_RULES, Calibration
from selfspec_cli.report.figure import save

_FAR = 1e30  # stands in for infinity, which scikit-learn refuses
INK, MUTED = "#1f2933", "#6b7785"
COLOURS = dict(zip(("none", *FEATURES, "calibrated"),
                   ("#a7b1bc", "#2f6fb3", "#c23b4b", "#b9803a", "#3a8f5c", "#8a5fb0", "#1d9aa8", "#1f2933"),
                   strict=True))  # fmt: skip


@dataclass
class AucRow:
    """One gate at one exit."""

    model: str
    E: int
    head: str
    k: int  # tokens a draft, none of them stopped
    gate: str
    drafted: int  # tokens that the area is over
    accepted: int
    auc: float | None  # in the draft: of every drafted token; None where all of them have one fate
    auc_at_stake: float | None  # of tokens whose predecessors were all accepted, each by itself
    threshold: float | None  # by replay of the log: where this gate is worth most, and with which draft length
    best_k: int
    expected_speedup: float  # by the measured costs of steps, over plain decoding
    best_fixed_speedup: float  # of the best draft length without a gate, likewise


def scores(log: DraftLog, gate: str, calibration: Calibration | None = None) -> Tensor:
    """A gate's statistic turned so that more of it means open, float32 [rounds, k]; NaN beyond the drafts."""
    if gate == "none":
        return torch.where(log.was_drafted, 1.0, torch.nan)
    feature = calibration.feature if gate == "calibrated" and calibration is not None else gate
    value = log.feature(feature)
    if gate == "calibrated":
        assert calibration is not None
        return gates.calibrated(value.reshape(-1), calibration).view_as(value)
    return value if GATE_RULES[gate].direction == "at_least" else -value


def auc(log: DraftLog, gate: str, calibration: Calibration | None = None, *, at_stake: bool = False) -> float | None:
    """Area under the ROC curve, 0.5 for a gate that tells nothing; None where every token has the same fate."""
    truth, score = _labelled(log, gate, calibration, at_stake)
    if len(truth) == 0 or bool(truth.all()) or not bool(truth.any()):
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth.numpy(), score.numpy()))


def curve(
    log: DraftLog, gate: str, calibration: Calibration | None = None, *, at_stake: bool = False
) -> tuple[list[float], list[float]]:
    """(false positive rates, true positive rates), both rising from 0 to 1."""
    from sklearn.metrics import roc_curve

    truth, score = _labelled(log, gate, calibration, at_stake)
    false_rate, true_rate, _ = roc_curve(truth.numpy(), score.numpy())
    return false_rate.tolist(), true_rate.tolist()


def draw(panels: Sequence[tuple[str, DraftLog, Calibration | None]], path: str | Path, footer: str = "") -> Path:
    """Write the curves as PNG: a column of two panels for each (title, log, calibration)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(panels), figsize=(4.6 * len(panels) + 0.4, 10.2), squeeze=False, layout="constrained"
    )
    for column, (title, log, calibration) in enumerate(panels):
        _panel(axes[0, column], f"{title}\nevery drafted token, as the gate meets it in the draft", log, calibration)
        _panel(axes[1, column], "tokens whose predecessors were right, each by itself", log, calibration, at_stake=True)
    figure.suptitle("Which drafted tokens will stand: ROC of each gate", x=0.012, ha="left", fontsize=14, color=INK)
    figure.supxlabel(footer, x=0.012, ha="left", fontsize=7.5, color=MUTED)
    return save(figure, path)


def write(rows: Sequence[AucRow], path: str | Path) -> Path:
    """Write the table as CSV; a value that is not there is an empty cell."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([column.name for column in fields(AucRow)])
        for row in rows:
            table.writerow([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in asdict(row).values()])
    return path


def _labelled(log: DraftLog, gate: str, calibration: Calibration | None, at_stake: bool) -> tuple[Tensor, Tensor]:
    """Truth (bool) and score of the tokens in question, [n] each; tokens without a finite score are left out."""
    score = scores(log, gate, calibration)
    if not at_stake:
        score = score.nan_to_num(nan=-torch.inf).cummin(1).values  # NaN closes the gate for the rest of the draft
        score = torch.where(torch.isfinite(score), score, -_FAR)
    asked = (log.was_at_stake if at_stake else log.was_drafted) & torch.isfinite(score)
    return log.was_accepted[asked], score[asked]


def _panel(axis: Any, title: str, log: DraftLog, calibration: Calibration | None, *, at_stake: bool = False) -> None:
    axis.plot([0, 1], [0, 1], color=COLOURS["none"], linewidth=1, linestyle=(0, (4, 3)), label="none 0.50")
    names = [*FEATURES, *(["calibrated"] if calibration is not None else [])]
    areas = {name: auc(log, name, calibration, at_stake=at_stake) for name in names}
    for name in sorted((name for name in names if areas[name] is not None), key=lambda name: -(areas[name] or 0)):
        style = {"linestyle": (0, (2, 2)), "linewidth": 1.4} if name == "calibrated" else {"linewidth": 1.6}
        points = curve(log, name, calibration, at_stake=at_stake)
        axis.plot(*points, color=COLOURS[name], label=f"{name} {areas[name]:.2f}", **style)
    axis.set_title(title, loc="left", fontsize=10, color=MUTED)
    axis.set_xlabel("rejected drafts that pass the gate", fontsize=8.5, color=MUTED, loc="left")
    axis.set_ylabel("accepted drafts that pass the gate", fontsize=8.5, color=MUTED, loc="bottom")
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.set_aspect("equal")
    axis.tick_params(length=0, labelcolor=MUTED, labelsize=8)
    axis.grid(color="#e4e8ec")
    axis.legend(loc="lower right", fontsize=8, frameon=False, title="gate, area", title_fontsize=8)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
