"""What a gate is: a rule on one statistic of the draft distribution, and how that statistic is computed."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from selfspec_cli.early_exit.errors import SettingsError, closest

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec_cli.early_exit.gates.distribution import Distribution

Direction = Literal["at_least", "at_most"]

THRESHOLD_KEYS = ("threshold", "tau", "tau_v")
"""Names of a gate's threshold: `threshold`, which every gate with a threshold takes, and the names in the papers."""

DEVICE_NAMES = {
    "confidence": "the greatest probability",
    "second": "the second greatest probability, 0 over a vocabulary of one token",
    "entropy": "the entropy in nats",
    "varentropy": "the variance of -log p under p, in squared nats",
    "logit": "the greatest logit",
    "logsumexp": "the log of the sum of e^logit",
    "previous": "this gate's own statistic at the step before, 1 at the first (for cumulative gates)",
}
"""What a gate's `device` expression may use beside `tl` (triton.language): one float32 number for each row."""


@dataclass(frozen=True)
class Rule:
    """A gate in force: open while statistic `feature` is at_least, or at_most, `threshold`; always where feature is
    None."""

    feature: str | None
    direction: Direction
    threshold: float

    def is_open(self, statistic: Tensor, threshold: Tensor | None = None) -> Tensor:
        """Which requests keep drafting: statistic of `feature`, any shape -> bool of that shape. NaN closes the gate.
        threshold: one for each request, of the same shape; None: the rule's for all."""
        if self.feature is None:
            return statistic.new_ones(statistic.shape).bool()
        limit = self.threshold if threshold is None else threshold
        return statistic >= limit if self.direction == "at_least" else statistic <= limit


@dataclass(frozen=True)
class Gate:
    """One gate: its rule, its statistic on the CPU and on CUDA, and how it is shown.

    name: what users write. meaning: the statistic in words, for messages. help: one line for users. colour: of its line
    in figures, as #rrggbb. key: the name of its threshold, of THRESHOLD_KEYS (None: it has none). direction: the gate
    is open while the statistic is at least, or at most, the threshold. default: the threshold when none is given. low,
    high: thresholds allowed (inclusive).
    statistic: function(distribution, previous) -> float32 [N] in torch; None for a gate that computes nothing from
    logits. previous: the statistic at the step before, [N], or 1.0 at the first step; only a `cumulative` gate may use
    it.
    device: the same as a Triton expression over DEVICE_NAMES and `tl`, one number a row. None: refused on CUDA.
    range: function(vocabulary size) -> least and greatest value of the statistic; None: 0 and 1.

    Raises SettingsError for an unknown `key`, and for a `device` expression that is none or uses unknown names."""

    name: str
    meaning: str
    help: str
    colour: str
    key: str | None = None
    direction: Direction = "at_least"
    default: float | None = None
    low: float = 0.0
    high: float = 0.0
    statistic: Callable[[Distribution, Tensor | float], Tensor] | None = None
    device: str | None = None
    cumulative: bool = False
    range: Callable[[int], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.key not in THRESHOLD_KEYS:
            raise SettingsError(f"gate {self.name!r}: {closest(self.key, THRESHOLD_KEYS, 'threshold key')}")
        if self.device is not None:
            _check_expression(self.name, self.device, self.cumulative)

    def rule(self, threshold: float | None = None) -> Rule:
        """The gate with a threshold (None: its default), as a comparison of one logged statistic."""
        limit = self.default if threshold is None else threshold
        if self.statistic is None or limit is None:
            return Rule(None, "at_least", -math.inf)
        return Rule(self.name, self.direction, limit)

    def statistic_range(self, vocab_size: int | None = None) -> tuple[float, float]:
        """Least and greatest value of the statistic over a vocabulary of that many tokens; None: an unknown number."""
        return (0.0, 1.0) if self.range is None else self.range(vocab_size or 2**20)  # no released model has more


def _check_expression(gate: str, expression: str, cumulative: bool) -> None:
    try:
        tree = ast.parse(f"({expression})", mode="eval")
    except SyntaxError as error:
        raise SettingsError(f"gate {gate!r}: its device expression {expression!r} is no expression: {error}") from error
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unknown = sorted(used - DEVICE_NAMES.keys() - {"tl"})
    if unknown:
        raise SettingsError(
            f"gate {gate!r}: its device expression {expression!r} uses {', '.join(unknown)}; allowed: "
            f"{', '.join(DEVICE_NAMES)}, tl"
        )
    if "previous" in used and not cumulative:
        raise SettingsError(f"gate {gate!r}: its device expression uses previous, so it must be made cumulative=True")
