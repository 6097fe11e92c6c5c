"""The gate of a running engine: its kind and threshold can change between any two rounds, without a reload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from selfspec_cli.early_exit import gates
from selfspec_cli.early_exit.gate_rules import Calibration
from selfspec_cli.early_exit.settings import SettingsError, check_threshold


class Drafting(Protocol):
    """What a gate remembers between the steps of a round: the product of confidences, [n], None before the first."""

    survival: Tensor | None


class LiveGate:
    """Decides after each draft step which requests go on."""

    def __init__(self, kind: str, threshold: float | None, calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self.set(kind, threshold)

    def set(self, kind: str, threshold: float | None) -> None:
        """Change the gate. Raises SettingsError for an unknown gate or a threshold out of its range."""
        checked = check_threshold(kind, threshold)
        if kind == "calibrated" and self.calibration is None:
            raise SettingsError("gate 'calibrated' needs the calibration that the engine was not started with")
        self.kind, self.threshold = kind, checked

    def decide(self, logits: Tensor, state: Drafting) -> Tensor:
        """Draft logits [n, V] -> bool [n], true where drafting goes on; keeps the running product in `state`."""
        if self.kind == "none":
            return torch.ones(logits.shape[0], dtype=torch.bool)
        value = gates.statistic(self.kind, logits, state.survival, self.calibration)
        if self.kind == "survival":
            state.survival = value
        return gates.is_open(self.kind, value, self.threshold)


@dataclass
class DraftCounters:
    """What drafting did, counted where it happens: steps taken, and requests that were active in each."""

    k: int
    rounds: int = 0  # rounds in which anything was drafted
    steps: int = 0  # forward passes of the trunk
    drafted: int = 0  # tokens: active requests summed over steps
    gate_ended: int = 0  # rounds that the gate ended before k
    length_histogram: list[int] = field(default_factory=list)  # rounds by number of steps taken, index 0..k

    def __post_init__(self) -> None:
        self.length_histogram = [0] * (self.k + 1)
        self._taken = 0

    def round(self, requests: int) -> None:
        """A round begins with so many requests."""
        self._close()
        self.rounds += 1

    def step(self, requests: int) -> None:
        """One forward pass of the trunk over so many requests."""
        self.steps += 1
        self.drafted += requests
        self._taken += 1

    def ended_early(self) -> None:
        """Every request's gate closed before the last step."""
        self.gate_ended += 1

    def snapshot(self) -> dict[str, int | list[int]]:
        """The counters since the engine started, as plain values."""
        self._close()
        names = ("rounds", "steps", "drafted", "gate_ended")
        return {name: getattr(self, name) for name in names} | {"length_histogram": list(self.length_histogram)}

    def _close(self) -> None:
        if self._taken:
            self.length_histogram[self._taken] += 1
            self._taken = 0
