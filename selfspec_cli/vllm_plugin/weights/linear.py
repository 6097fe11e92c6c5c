"""What a draft step multiplies the target's weights with: gemv.py at one token, PyTorch's kernels at more.

An operator of its own, because torch.compile traces the trunk once for any number of tokens: the choice has to fall
when a step runs (or when a CUDA graph records it). Only drafts are computed so. The verify pass runs vLLM's kernels, so
another way to round a sum can change a draft, and with it which of the target's samples a seed gives, but neither a
greedy output nor a distribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.vllm_plugin.weights.replace import shallow_copy

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return torch.ops.selfspec.linear(x, weight, bias) if x.is_cuda else F.linear(x, weight, bias)


@torch.library.custom_op(
    "selfspec::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    one_token = x.is_cuda and x.numel() == weight.shape[1] and x.is_contiguous() and weight.is_contiguous()
    if one_token and x.dtype is weight.dtype:
        from selfspec_cli.vllm_plugin.weights.gemv import gemv  # imports Triton, which a machine without a GPU may lack

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


def multiplies_with_pytorch(vllm_config: VllmConfig) -> bool:
    """Whether the linear layers of an engine multiply by plain weights with PyTorch's linear, as they do on CUDA unless
    `linear_backend` asks for another kernel."""
    from selfspec_cli.vllm_plugin.vllm_names import default_unquantized_gemm, dispatch_unquantized_gemm

    return dispatch_unquantized_gemm(vllm_config.kernel_config.linear_backend) is default_unquantized_gemm


def all_on_own_weights(layers: Iterable[nn.Module]) -> bool:
    """Whether all linear layers in there multiply by the target's own weights with this operator."""
    from selfspec_cli.vllm_plugin.vllm_names import LinearBase

    linears = [part for layer in layers for part in layer.modules() if isinstance(part, LinearBase)]
    return bool(linears) and all(isinstance(part.quant_method, SharedLinear) for part in linears)


def on_own_weight(module: nn.Module, name: str) -> nn.Module | None:
    """A linear layer on `module`'s own weight and this operator, where that weight is plain and on CUDA; None for
    everything else. For `with_replaced`, where `multiplies_with_pytorch`."""
    from selfspec_cli.vllm_plugin.vllm_names import LinearBase, UnquantizedLinearMethod

    if not isinstance(module, LinearBase):
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(module.quant_method, UnquantizedLinearMethod) or not isinstance(weight, Tensor):
        return None
    if weight.dim() != 2 or not weight.is_cuda:
        return None
    return shallow_copy(module, quant_method=SharedLinear())
