"""The draft on copies that were made from data (`selfspec fit-weights`, early_exit/fitted_weights.py).

They take the place of copies that are rounded at load; what multiplies by them is the same (weights/copied.py). Layers
that a file does not hold are rounded at load, as without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.fitted_weights import FittedWeights
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.refusals import refuse_fitted_copies
from selfspec_cli.vllm_plugin.weights.copied import copied, on_copies
from selfspec_cli.vllm_plugin.weights.replace import Make

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig


def fitted_for(settings: ResolvedSettings, target: nn.Module, vllm_config: VllmConfig) -> FittedWeights | None:
    """The copies that `settings` name, checked against this model; None where they are rounded at load.

    Raises SettingsError for a file of another model or another kind of copies, and on several ranks.
    """
    if settings.draft_weights_path is None:
        return None
    refuse_fitted_copies(settings.draft_weights_path, vllm_config.parallel_config.tensor_parallel_size)
    from selfspec_cli.vllm_plugin.exit_head import fingerprint

    path, kind = settings.draft_weights_path, settings.draft_weights
    return fitted_weights.load(path, kind, fingerprint(target, vllm_config))


class CorrectedWeight(nn.Module):
    """x [n, in] -> [n, out]: a copied weight's product, and a correction of low rank."""

    def __init__(self, copy: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.copy = copy
        self.down = nn.Parameter(down, requires_grad=False)  # [rank, in]
        self.up = nn.Parameter(up, requires_grad=False)  # [out, rank]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self.copy(x, bias)
        return out + F.linear(F.linear(x.reshape(-1, x.shape[-1]), self.down), self.up)


def on_fitted_copies(fitted: FittedWeights, dtype: torch.dtype) -> Make:
    """For `replace.with_replaced`, as `copied.on_copies`: a linear layer on its stored copy, where there is one."""
    rounded = on_copies(DRAFT_WEIGHTS[fitted.about.kind], dtype)

    def make(module: nn.Module, name: str) -> nn.Module | None:
        if name not in fitted.copies:
            return rounded(module, name)
        made: Any = copied(fitted.kind_of(name), dtype, module, name)
        if name in fitted.corrections:
            copy = made.copy_of_weight
            device = next(copy.parameters()).device
            down, up = (tensor.to(device, dtype) for tensor in fitted.corrections[name])
            made._modules["copy_of_weight"] = CorrectedWeight(copy, down, up)
        result: nn.Module = made
        return result

    return make
