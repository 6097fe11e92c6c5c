"""The draft distribution that gates judge. torch is imported when the first statistic is computed, not with the module.

All is computed in float32 from logits of any float type; p is softmax(logits). Logits of -inf (tokens that cannot be
drafted) count as p = 0. In a row with NaN or +inf, or with no finite logit, everything is NaN.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Stands in for log 0 wherever p multiplies it: 0 * -1e4 is 0, where 0 * -inf would be NaN.
_LOG_ZERO = -1e4


class Distribution:
    """Logits [N, V] and their statistics, each computed once. Nothing of it may be changed in place."""

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
