"""The gate of a running engine: its kind and threshold can change between any two rounds, without a reload."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, Rule
from selfspec_cli.early_exit.gates.distribution import Distribution
from selfspec_cli.early_exit.thresholds import calibration_from_dict, check_threshold

LARGEST_FLOAT = 3.4028234663852886e38
"""Of 32 bits, in which the device compares; in place of infinity."""


class Drafting(Protocol):
    """What a gate remembers between the steps of a round: its statistic at the step before, [n], None at the first; and
    the limits of requests that have their own."""

    previous: Tensor | None
    limits: Tensor | None  # [n], what each request's statistic is compared with; None: with the gate's own


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
        if GATES[kind].needs_calibration and known is None:
            raise SettingsError(f"gate {kind!r} needs a calibration, and the engine was started without one")
        rule = GATES[kind].rule(checked, known)
        self._accept(rule)
        self.kind, self.threshold, self.calibration, self.rule = kind, checked, known, rule
        self._computes = None if rule.feature is None else GATES[rule.feature]  # whose statistic is compared

    def _accept(self, rule: Rule) -> None:
        """For subclasses: raises SettingsError for a rule that they cannot follow, before anything has changed."""

    def decide(self, logits: Tensor, state: Drafting) -> Tensor | None:
        """Draft logits [n, V] -> bool [n], true where drafting goes on; keeps a cumulative statistic in `state`.

        None: all go on.
        """
        gate = self._computes
        if gate is None or gate.statistic is None:
            return None
        value = gate.statistic(Distribution(logits), 1.0 if state.previous is None else state.previous)
        if gate.cumulative:
            state.previous = value
        return self.rule.is_open(value, state.limits)

    def limit(self, threshold: float | None) -> float:
        """What the statistic is compared with under another threshold of the gate in force; None: under its own."""
        rule = self.rule if threshold is None else GATES[self.kind].rule(threshold, self.calibration)
        return rule.threshold if math.isfinite(rule.threshold) else math.copysign(LARGEST_FLOAT, rule.threshold)
