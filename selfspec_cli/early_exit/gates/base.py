"""What a gate is: a rule on one statistic of the draft distribution, and how that statistic is computed. torch is
imported when the first statistic is, not with the module."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from selfspec_cli.early_exit.errors import SettingsError, closest

if TYPE_CHECKING:
    from torch import Tensor


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
    """A gate in force: open while statistic `feature` is at_least, or at_most, `threshold`; always without feature."""

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


# Stands in for log 0 wherever p multiplies it: 0 * -1e4 is 0, where 0 * -inf would be NaN.
_LOG_ZERO = -1e4


class Distribution:
    """Logits [N, V] and their statistics, each computed once. Nothing of it may be changed in place.
    All is computed in float32 from logits of any float type; p is softmax(logits). Logits of -inf (tokens that cannot
    be drafted) count as p = 0. In a row with NaN or +inf, or with no finite logit, everything is NaN."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @cached_property
    def probabilities(self) -> Tensor:
        """p, [N, V]. One operation, whichever is cheaper: a gate runs after every draft step on logits [1, V]."""
        import torch

        if "log_probabilities" in self.__dict__:  # computed already
            return self.log_probabilities.exp()
        return torch.softmax(self.logits, dim=-1, dtype=torch.float32)

    @cached_property
    def log_probabilities(self) -> Tensor:
        """log p, [N, V], with a number that p = 0 cancels in place of -inf."""
        import torch

        return torch.log_softmax(self.logits, dim=-1, dtype=torch.float32).clamp_min_(_LOG_ZERO)

    @cached_property
    def confidence(self) -> Tensor:
        """max_i p_i, [N], in [1/V, 1]."""
        return self.probabilities.amax(-1)

    @cached_property
    def second(self) -> Tensor:
        """The second greatest probability, [N], in [0, 1/2]; 0 over a vocabulary of one token."""
        if self.logits.shape[-1] == 1:
            return self.confidence * 0  # keeps NaN
        return self.probabilities.topk(2, dim=-1).values[..., 1]

    @cached_property
    def entropy(self) -> Tensor:
        """H = -sum_i p_i log p_i in nats, [N], in [0, log V] (Shannon, 1948)."""
        return -self._mean_log

    @cached_property
    def varentropy(self) -> Tensor:
        """Variance of -log p under p: sum_i p_i (log p_i + H)^2 in squared nats, [N]."""
        import torch

        centred = self.log_probabilities - self._mean_log.unsqueeze(-1)  # E[x^2] - E[x]^2 would cancel in float32
        return torch.linalg.vecdot(self.probabilities, centred.square_())

    @cached_property
    def logit(self) -> Tensor:
        """The greatest logit, [N]."""
        return self.logits.amax(-1).float()

    @cached_property
    def logsumexp(self) -> Tensor:
        """log sum_i e^logit_i, [N]."""
        return self.logits.float().logsumexp(-1)

    @cached_property
    def _mean_log(self) -> Tensor:
        import torch

        logs = self.log_probabilities  # first, so that the probabilities are made from it
        return torch.linalg.vecdot(self.probabilities, logs)
