"""Step times of an engine from measured rounds, and the speedup that they predict for any exit layer, head and k.

A round that drafts k tokens takes, on a machine where a verify step need not cost what a decode step costs,

    R(E, k) = verify + k * (overhead + per_layer * E + T_head)

`cost_model` with T_E = overhead + per_layer * E, except that the verify step has a time of its own. What k adds to the
verify step (a CPU notices each further token) lands in `overhead`, for it is as linear in k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from selfspec_cli.early_exit.cost_model import round_cost


@dataclass(frozen=True)
class StepTimes:
    """Seconds. T: a decode step of the full model. verify: the part of a round that does not grow with k.

    overhead: what a draft step costs apart from its layers and its head. per_layer: one decoder layer, one token a
    request.
    """

    T: float
    verify: float
    overhead: float
    per_layer: float

    def round(self, layer: int, k: int, head_seconds: float) -> float:
        """Seconds of a round that drafts k tokens after `layer` layers."""
        return round_cost(self.verify, max(0.0, self.overhead + self.per_layer * layer), head_seconds, k)

    def speedup(self, tokens: float, layer: int, k: int, head_seconds: float) -> float:
        """Predicted tokens per time over those of the full model, for rounds that yield `tokens` on average."""
        return tokens * self.T / self.round(layer, k, head_seconds)

    def best_k(self, tokens: Mapping[int, float], layer: int, head_seconds: float) -> tuple[int, float]:
        """The k of greatest predicted speedup among `tokens` (k -> tokens a round), with that speedup."""
        k = max(tokens, key=lambda k: (self.speedup(tokens[k], layer, k, head_seconds), -k))
        return k, self.speedup(tokens[k], layer, k, head_seconds)

    def to_dict(self) -> dict[str, float]:
        """JSON form."""
        return asdict(self)


def fit_step_times(T: float, rounds: Sequence[tuple[int, int, float]], head_seconds: float) -> StepTimes:
    """Step times from measured rounds, by least squares (exact for three).

    T: seconds of a decode step without drafting. rounds: (exit layer, k, seconds a round), at least three, with two
    layers and two k among them, all with one head that takes `head_seconds`. Raises ValueError for rounds that do not
    determine the times, or a T that is not positive.
    """
    if not T > 0:
        raise ValueError(f"T = {T!r} must be positive")
    rows = torch.tensor([[1.0, k, k * layer] for layer, k, _ in rounds], dtype=torch.float64)
    if len(rounds) < 3 or torch.linalg.matrix_rank(rows) < 3:
        raise ValueError("step times need rounds at two exit layers and at two draft lengths, three at least")
    seconds = torch.tensor([[measured - k * head_seconds] for _, k, measured in rounds], dtype=torch.float64)
    verify, overhead, per_layer = torch.linalg.lstsq(rows, seconds).solution.flatten().tolist()
    return StepTimes(T, verify, overhead, per_layer)
