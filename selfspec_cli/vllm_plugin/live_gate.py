"""The gate of a running engine: its kind and threshold can change between any two rounds, without a reload."""

from typing import Any

from torch import Tensor

from selfspec_cli.early_exit.gates import GATES, check_threshold
from selfspec_cli.early_exit.gates.base import Distribution


class LiveGate:
    """Decides after each draft step which requests go on."""

    def __init__(self, kind: str, threshold: float | None) -> None:
        self.set(kind, threshold)

    def set(self, kind: str, threshold: float | None) -> None:
        """Change the gate. Raises SettingsError for an unknown gate, or a threshold out of its range."""
        checked = check_threshold(kind, threshold)
        rule = GATES[kind].rule(checked)
        self.kind, self.threshold, self.rule = kind, checked, rule
        self._computes = None if rule.feature is None else GATES[rule.feature]  # whose statistic is compared

    def decide(self, logits: Tensor, state: Any) -> Tensor | None:
        """Draft logits [n, V] -> bool [n], true where drafting goes on; None: all go on. state: the round
        (v1/round.py), whose `limits` are compared with, and whose `previous` keeps a cumulative statistic for the next
        step."""
        gate = self._computes
        if gate is None or gate.statistic is None:
            return None
        value = gate.statistic(Distribution(logits), 1.0 if state.previous is None else state.previous)
        if gate.cumulative:
            state.previous = value
        return self.rule.is_open(value, state.limits)

    def limit(self, threshold: float | None) -> float:
        """What the statistic is compared with under another threshold of the gate in force; None: under its own."""
        return self.rule.threshold if threshold is None else GATES[self.kind].rule(threshold).threshold
