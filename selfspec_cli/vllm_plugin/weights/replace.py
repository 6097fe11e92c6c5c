"""Modules that share everything with the target's but a few parts, which are replaced. The target is not changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from selfspec_cli.vllm_plugin.decoder import has_experts

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig

Make = Callable[[nn.Module, str], nn.Module | None]
"""(module, its dotted name) -> what stands in its place, or None to look at its children."""


def replace_in_layers(
    layers: nn.ModuleList,
    chosen: Sequence[int],
    vllm_config: VllmConfig,
    make: Make,
    experts: Make | None = None,
    attention: Make | None = None,
) -> list[nn.Module]:
    """The `chosen` layers, in that order, in which every part is replaced for which `make` has something else.

    What vLLM looks up by name in a forward pass (attention and its KV cache) stays the same object; `attention` may put
    something around it. A mixture of experts, whose parts hold on to each other, is given to `experts` whole; without
    it, it stays too.
    """
    by_name = {id(module) for module in vllm_config.compilation_config.static_forward_context.values()}
    mixtures = {id(part) for i in chosen for part in layers[i].children() if has_experts(part)}

    def replacement(module: nn.Module, name: str) -> nn.Module | None:
        if id(module) in mixtures:
            return module if experts is None else experts(module, name)
        if id(module) in by_name:
            return module if attention is None else attention(module, name) or module
        return make(module, name)

    return [with_replaced(layers[i], replacement, f"layers.{i}") for i in chosen]


def with_replaced(module: nn.Module, make: Make, name: str = "") -> nn.Module:
    """`module` with every part for which `make` has a replacement replaced; `module` itself if there is none.

    What holds a replaced part is copied shallowly, all else is shared, and `module` is not changed. A part for which
    `make` returns the part itself is shared whole.
    """
    made = make(module, name)
    if made is not None:
        return made
    children = {key: child for key, child in module._modules.items() if child is not None}
    parts = {key: with_replaced(child, make, f"{name}.{key}") for key, child in children.items()}
    changed = {key: part for key, part in parts.items() if part is not children[key]}
    return shallow_copy(module, _modules={**module._modules, **changed}) if changed else module


def shallow_copy(module: nn.Module, **changes: Any) -> nn.Module:
    """Another module of the same class and state but for `changes`; bound methods that it stores are its own."""
    copy: nn.Module = object.__new__(type(module))
    for key, value in {**module.__dict__, **changes}.items():
        own = isinstance(value, MethodType) and value.__self__ is module
        copy.__dict__[key] = MethodType(value.__func__, copy) if own else value
    return copy


def without_adapters(model: nn.Module) -> nn.Module:
    """`model` with every layer that can hold adapters replaced by the layer that it wraps; `model` itself if none is.

    Drafts are made without the adapter of a request. The verify pass, which decides on every token, runs with it, so
    the output is the adapted model's own; the further an adapter moves the model, the fewer drafts are accepted. vLLM
    sets which token has which adapter once for a step of the target, and a draft loop that runs on the device cannot
    ask it to do so again.

    Nothing is copied, and `model` is not changed. Adapters of experts are not found: vLLM applies them in the experts'
    kernels.
    """
    from selfspec_cli.vllm_plugin.vllm_names import BaseLayerWithLoRA

    def make(module: nn.Module, name: str) -> nn.Module | None:
        base: nn.Module | None = module.base_layer if isinstance(module, BaseLayerWithLoRA) else None
        return base

    return with_replaced(model, make)
