"""The gate of a running engine: its kind and threshold can change between any two rounds, without a reload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from selfspec_cli.early_exit import gates
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gate_rules import Calibration
from selfspec_cli.early_exit.thresholds import calibration_from_dict, check_threshold


class Drafting(Protocol):
    """What a gate remembers between the steps of a round: the product of confidences, [n], None before the first."""

    survival: Tensor | None


class LiveGate:
    """Decides after each draft step which requests go on."""

    def __init__(self, kind: str, threshold: float | None, calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self.set(kind, threshold)

    def set(self, kind: str, threshold: float | None, calibration: Mapping[str, Any] | None = None) -> None:
        """Change the gate. calibration: a map in its JSON form for gate `calibrated`; None keeps the one there is.

        Raises SettingsError for an unknown gate, a threshold out of its range or a wrong calibration.
        """
        checked = check_threshold(kind, threshold)
        known = self.calibration if calibration is None else calibration_from_dict(calibration)
        if kind == "calibrated" and known is None:
            raise SettingsError("gate 'calibrated' needs a calibration, and the engine was started without one")
        self.kind, self.threshold, self.calibration = kind, checked, known

    def decide(self, logits: Tensor, state: Drafting) -> Tensor | None:
        """Draft logits [n, V] -> bool [n], true where drafting goes on; keeps the running product in `state`.

        None: all go on.
        """
        if self.kind == "none":
            return None
        value = gates.statistic(self.kind, logits, state.survival, self.calibration)
        if self.kind == "survival":
            state.survival = value
        elif self.calibration is not None and self.kind == "calibrated" and self.calibration.feature == "survival":
            state.survival = gates.survival(logits, state.survival)
        return gates.is_open(self.kind, value, self.threshold)
