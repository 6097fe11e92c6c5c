"""Weights that are replaced in a live engine: what was made of the old ones is made anew.

A draft that shares the target's weights follows them. Copies, and rows of the lm_head that were gathered for a draft
vocabulary, are tensors of their own; they are filled anew in place, because CUDA graphs hold their addresses. What was
fitted to the old weights (an exit head's file, copies that were made from data) cannot be; the log says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec_cli.early_exit.resolved import ResolvedSettings

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig

Function = Callable[..., Any]


def after_new_weights(original: Function) -> Function:
    """Override of the methods of vLLM's `Worker` after which a live model has other weights."""

    @functools.wraps(original)
    def replace_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        runner = self.model_runner
        drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if hasattr(drafter, "renew"):
            drafter.renew()
        return answer

    return replace_weights


def keep_weights_asleep(original: Function) -> Function:
    """Override of `sleep` of vLLM's `Worker`: with drafts of ours, level 2 is level 1.

    Level 2 drops all that was allocated while the model was loaded. New weights bring copies back, but nothing
    else: an exit head, token ids, the layout of a kernel, counters that kernels leave at zero. Level 1 frees the
    same memory of the GPU, copies included, and keeps it on the host until `wake_up`.
    """

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level == 2 and hasattr(getattr(self.model_runner, "speculator", None), "renew"):
            logging.getLogger("vllm.selfspec").warning(
                "sleep at level 2 keeps weights on the host, as level 1 does: early exit has more than weights to keep"
            )
            level = 1
        return original(self, level, *args, **kwargs)

    return sleep


class Watch:
    """Whether weights were loaded into a live model past vLLM's own methods: trainers call the model's `load_weights`,
    some of them many times for one set of weights, so what follows from it waits for the next round."""

    def __init__(self, model: nn.Module) -> None:
        self.stale = False
        load: Function = model.load_weights  # type: ignore[assignment]

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            self.stale = True
            return load(*args, **kwargs)

        model.load_weights = load_weights  # type: ignore[assignment]


@torch.inference_mode()
def renew(trunk: nn.Module, head: Any, settings: ResolvedSettings, vllm_config: VllmConfig) -> None:
    """Fill every copy in a draft's layers and its head from the target's weights of now, one layer at a time."""
    layers: tuple[nn.Module, ...] = trunk.drafting_layers  # type: ignore[assignment]
    by_name = vllm_config.compilation_config.static_forward_context
    known = dict(by_name)
    if settings.draft_weights_path is None:
        for place, layer in enumerate(layers):
            refill(layer, trunk.remade_layer(place))  # type: ignore[operator]
            by_name.update(known)  # copies of experts are found by name in a forward pass: those that draft
    head.renew()
    paths = {"head_path": settings.head.path, "draft_weights_path": settings.draft_weights_path}
    fitted = [name for name, path in paths.items() if path is not None]
    if fitted:
        logging.getLogger("vllm.selfspec").warning(
            "the model has new weights, and %s was fitted to the old ones: drafts may be accepted less often, the "
            "output stays the model's own",
            " and ".join(fitted),
        )


def refill(old: nn.Module, new: nn.Module) -> None:
    """Copy every tensor of `new` into the one of the same name in `old`, but those that they share."""
    made = dict(new.named_modules())
    for name, part in old.named_modules():
        other = made[name]
        if other is part:
            continue
        for tensors, others in ((part._parameters, other._parameters), (part._buffers, other._buffers)):
            for key, tensor in others.items():
                mine = tensors.get(key)
                if tensor is None or mine is None or mine is tensor:
                    continue
                mine.data.copy_(tensor.data)
