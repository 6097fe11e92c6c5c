"""Every gate statistic of some logits, for tests."""

import torch
from torch import Tensor

from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.gates.base import Distribution


def all_statistics(logits: Tensor, before: Tensor | None = None) -> Tensor:
    """Logits [n, V] -> float32 [n, features]. before: the result for the step before, None at the first step."""
    draft = Distribution(logits)
    columns = [
        GATES[name].statistic(draft, 1.0 if before is None else before[:, column])
        for column, name in enumerate(features())
    ]
    return torch.stack(columns, dim=-1)


def statistic(name: str, logits: Tensor, previous: Tensor | float = 1.0) -> Tensor:
    """One gate's statistic of logits [n, V], [n]."""
    return GATES[name].statistic(Distribution(logits), previous)
