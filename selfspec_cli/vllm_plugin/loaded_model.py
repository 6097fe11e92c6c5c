"""What is done to a target right after it is loaded: cut it (method `skip`), or tap it (to fit exit heads)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.exit_head import load_exit_head
from selfspec_cli.vllm_plugin.spec_config import collects, settings_of
from selfspec_cli.vllm_plugin.trunk import cut

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig


def after_loading(original: Callable[..., None]) -> Callable[..., None]:
    """Override of a model runner's `load_model`."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings, layers = settings_of(self.vllm_config), collects(self.vllm_config)
        if settings is not None and not settings.verify:
            decode_with_first_layers(self.get_model(), settings, self.vllm_config)
        if layers:
            from selfspec_cli.vllm_plugin.fitting.collect import tap

            tap(self.get_model(), layers)

    return load_model


def decode_with_first_layers(model: nn.Module, settings: ResolvedSettings, vllm_config: VllmConfig) -> None:
    """Method `skip`: the model itself ends after E layers and speaks through the exit head. Lossy.

    Every path to the logits goes through `compute_logits`, so prompt log-probabilities (perplexity) are the truncated
    model's own too.
    """
    head = load_exit_head(settings, model, vllm_config)
    cut(model, settings.layer)

    def compute_logits(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return head.to_full_logits(head.logits(hidden_states))

    model.compute_logits = compute_logits  # type: ignore[assignment]
