"""What a draft step multiplies weights with: gemv.py at one token, PyTorch's and vLLM's kernels at more.

Operators of their own, because torch.compile traces the trunk once for any number of tokens: the choice has to fall
when a step runs (or when a CUDA graph records it). Only drafts are computed so. The verify pass runs vLLM's kernels, so
another way to round a sum can change a draft, never an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.vllm_plugin.twins import shallow


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return torch.ops.selfspec.linear(x, weight, bias) if x.is_cuda else F.linear(x, weight, bias)


def linear_e4m3(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [n, in] bf16, weight [out, in] e4m3, scale float32 [out, 1] -> [n, out] bf16. CUDA only."""
    return torch.ops.selfspec.linear_e4m3(x, weight, scale)


@torch.library.custom_op(
    "selfspec::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _one_token(x, weight) and x.dtype is weight.dtype:
        from selfspec_cli.vllm_plugin.gemv import gemv  # imports Triton, which a machine without a GPU may lack

        return gemv(x, weight, bias=bias)
    return F.linear(x, weight, bias)


@torch.library.custom_op(
    "selfspec::linear_e4m3", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor scale) -> Tensor"
)
def _linear_e4m3(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    if _one_token(x, weight):  # activations stay in bf16 (W8A16)
        from selfspec_cli.vllm_plugin.gemv import gemv

        return gemv(x, weight, scale)
    from vllm import _custom_ops as ops

    # CUTLASS wants activations in e4m3 too (W8A8), one scale a token. On an H200 it is faster than Marlin's W8A16 up
    # to 16 tokens (results/published/gpu/fp8).
    tokens, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
    return ops.cutlass_scaled_mm(tokens, weight.t(), scales, scale, out_dtype=x.dtype)


def _one_token(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.numel() == weight.shape[1] and x.is_contiguous() and weight.is_contiguous()


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_linear_e4m3.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class SharedLinear:
    """The `quant_method` of a linear layer of the trunk that multiplies by the target's own weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, in] -> [n, out]."""
        return linear(x, layer.weight, bias)


def shared_twin(module: nn.Module, name: str) -> nn.Module | None:
    """A linear layer on `module`'s own weight and these operators, where that weight is plain, on CUDA, and vLLM would
    multiply by it with PyTorch's linear; None for everything else. For `replaced`."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    if not isinstance(module, LinearBase):
        return None
    method, weight = module.quant_method, getattr(module, "weight", None)
    plain = isinstance(method, UnquantizedLinearMethod) and method._gemm_impl is default_unquantized_gemm
    if not plain or not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_cuda:
        return None
    return shallow(module, quant_method=SharedLinear())
