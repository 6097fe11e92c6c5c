"""The gate of a running engine: its kind and threshold can change between any two rounds, without a reload."""

from typing import Protocol

from torch import Tensor

from selfspec_cli.early_exit.gates import GATES, Rule, check_threshold
from selfspec_cli.early_exit.gates.distribution import Distribution


class Drafting(Protocol):
    """The part of a round that a gate reads and writes. previous: its statistic at the step before, [n]; None at the
    first. limits: what each request's statistic is compared with, [n]; None: with the gate's own limit."""

    previous: Tensor | None
    limits: Tensor | None


class LiveGate:
    """Decides after each draft step which requests go on."""

    def __init__(self, kind: str, threshold: float | None) -> None:
        self.set(kind, threshold)

    def set(self, kind: str, threshold: float | None) -> None:
        """Change the gate. Raises SettingsError for an unknown gate, or a threshold out of its range."""
        checked = check_threshold(kind, threshold)
        rule = GATES[kind].rule(checked)
        self._accept(rule)
        self.kind, self.threshold, self.rule = kind, checked, rule
        self._computes = None if rule.feature is None else GATES[rule.feature]  # whose statistic is compared

    def _accept(self, rule: Rule) -> None:
        """For subclasses: raises SettingsError for a rule that they cannot follow, before anything has changed."""

    def decide(self, logits: Tensor, state: Drafting) -> Tensor | None:
        """Draft logits [n, V] -> bool [n], true where drafting goes on; None: all go on.

        A cumulative statistic is kept in `state.previous`.
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
        return self.rule.threshold if threshold is None else GATES[self.kind].rule(threshold).threshold
