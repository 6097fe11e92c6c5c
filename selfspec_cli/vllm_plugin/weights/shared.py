"""What a draft shares with the target: modules of which a few parts are replaced, and the target's own weights.

A draft step multiplies these by one_token.py at one token and by PyTorch's kernels at more: an operator of its own,
because torch.compile traces the trunk once for any number of tokens, so the choice has to fall when a step runs (or a
CUDA graph records it). The verify pass runs vLLM's kernels, so another way to round a sum can change a draft, and with
it which of the target's samples a seed gives, but neither a greedy output nor a distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.decoder import has_experts

Make = Callable[[nn.Module, str], nn.Module | None]
"""(module, its dotted name) -> what stands in its place, or None to look at its children."""


def replace_in_layers(
    layers: nn.ModuleList,
    chosen: Sequence[int],
    vllm_config: vllm.VllmConfig,
    make: Make,
    experts: Make | None = None,
    attention: Make | None = None,
) -> list[nn.Module]:
    """The `chosen` layers, in that order, in which every part is replaced for which `make` has something else.
    What vLLM looks up by name in a forward pass (attention and its KV cache) stays the same object; `attention` may put
    something around it. A mixture of experts, whose parts hold on to each other, is given to `experts` whole, if at
    all."""
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
    """`module` with every part replaced for which `make` has a replacement; `module` itself if there is none. What
    holds a replaced part is copied shallowly, all else is shared; so is a part that `make` returns itself."""
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
    The verify pass, which decides on every token, runs with a request's adapter, so the output is the adapted model's
    own; the further it moves the model, the fewer drafts are accepted. vLLM sets which token has which adapter once for
    a step of the target, and a draft loop that runs on the device cannot ask it again. Nothing is copied, and `model`
    is not changed. Adapters of experts are not found: vLLM applies them in the experts' kernels."""

    def make(module: nn.Module, name: str) -> nn.Module | None:
        base: nn.Module | None = module.base_layer if isinstance(module, vllm.BaseLayerWithLoRA) else None
        return base

    return with_replaced(model, make)


# ---- the target's own weights ----------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return torch.ops.selfspec.linear(x, weight, bias) if x.is_cuda else F.linear(x, weight, bias)


@torch.library.custom_op(
    "selfspec::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    one_token = x.is_cuda and x.numel() == weight.shape[1] and x.is_contiguous() and weight.is_contiguous()
    if one_token and x.dtype is weight.dtype and x.dtype is not torch.float32:
        from selfspec_cli.vllm_plugin.weights.one_token import gemv  # imports Triton, which not every machine has

        return gemv(x, weight, bias=bias)
    return F.linear(x, weight, bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class SharedLinear:
    """The `quant_method` of a linear layer of the trunk that multiplies by the target's own weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; models of Hugging Face's have a dimension before the tokens'."""
        return linear(x.flatten(0, -2), layer.weight, bias).view(*x.shape[:-1], layer.weight.shape[0])


def multiplies_with_pytorch(vllm_config: vllm.VllmConfig) -> bool:
    """Whether an engine's linear layers use PyTorch's linear: on CUDA, unless `linear_backend` asks for another."""
    return vllm.dispatch_unquantized_gemm(vllm_config.kernel_config.linear_backend) is vllm.default_unquantized_gemm


def all_on_own_weights(layers: Iterable[nn.Module]) -> bool:
    """Whether all linear layers in there multiply by the target's own weights with this operator."""
    linears = [part for layer in layers for part in layer.modules() if isinstance(part, vllm.LinearBase)]
    return bool(linears) and all(isinstance(part.quant_method, SharedLinear) for part in linears)


def on_own_weight(module: nn.Module, name: str) -> nn.Module | None:
    """A linear layer on `module`'s own weight and this operator, where that weight is plain and on CUDA; None for
    everything else. For `with_replaced`, where `multiplies_with_pytorch`."""
    if not isinstance(module, vllm.LinearBase):
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(module.quant_method, vllm.UnquantizedLinearMethod) or not isinstance(weight, Tensor):
        return None
    if weight.dim() != 2 or not weight.is_cuda:
        return None
    return shallow_copy(module, quant_method=SharedLinear())
