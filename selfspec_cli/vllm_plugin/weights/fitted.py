"""The draft on copies that were made from data (`selfspec fit-weights`, early_exit/fitted_weights.py).

They take the place of copies that are rounded at load; what multiplies by them is the same (weights/copied.py). Layers
that a file does not hold are rounded at load, as without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

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


def on_fitted_copies(fitted: FittedWeights, dtype: torch.dtype) -> Make:
    """For `replace.with_replaced`, as `copied.on_copies`: a linear layer on its stored copy, where there is one."""
    rounded = on_copies(DRAFT_WEIGHTS[fitted.about.kind], dtype)

    def make(module: nn.Module, name: str) -> nn.Module | None:
        if name not in fitted.copies:
            return rounded(module, name)
        made: nn.Module = copied(fitted.kind_of(name), dtype, module, name)
        return made

    return make
