"""Products with e4m3 copies on CUDA (early_exit/draft_weights/fp8.py makes them). The interface: `copied.Kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from selfspec_cli.early_exit.draft_weights.fp8 import LARGEST
from selfspec_cli.vllm_plugin import vllm_names as vllm

COMPILE_SIZES = (1,)  # one token is multiplied in another way than more are


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The kernels read the copy as it was made."""
    return dict(tensors)


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
    """x [n, in] bf16, {"weight": e4m3 [out, in], "scale": float32 [out, 1]}, bias [out] -> [n, out] bf16. CUDA only.
    One token stays in bf16 (W8A16). More are turned into e4m3 too (W8A8), with one scale a token: vLLM's CUTLASS kernel
    is faster than Marlin's W8A16 up to 16 tokens on an H200 (results/published/gpu/fp8)."""
    out: Tensor = torch.ops.selfspec.linear_e4m3(x, tensors["weight"], tensors["scale"])
    return out if bias is None else out + bias


def compile_for(tokens: int, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
    """Nothing: Inductor compiles these products with the layers."""


def activation(module: nn.Module, name: str) -> nn.Module | None:
    """Activations stay vLLM's."""
    return None


def graph_pass() -> vllm.InductorPass | None:
    """None: Inductor fuses what quantises a token with what comes before by itself."""
    return None


def _linear_e4m3(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return _one_token(x.contiguous(), weight, scale) if x.shape[0] == 1 else _tokens(x, weight, scale)


# One operator for Dynamo, which traces the trunk once for any number of tokens. Being implicit it is no barrier for
# Inductor, which in vLLM's own compile mode compiles what was traced once for one token and once for more
# (COMPILE_SIZES) and finds in each graph the branch that belongs there: it makes the quantisation of the tokens a part
# of the norm before it.
_LIBRARY = torch.library.Library("selfspec", "FRAGMENT")
_LIBRARY.define("linear_e4m3(Tensor x, Tensor weight, Tensor scale) -> Tensor")
_LIBRARY.impl("linear_e4m3", _linear_e4m3, "CompositeImplicitAutograd")


@torch.library.custom_op(
    "selfspec::gemv_e4m3", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor scale) -> Tensor"
)
def _one_token(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    from selfspec_cli.vllm_plugin.weights.one_token import gemv  # imports Triton, which not every machine has

    return gemv(x, weight, scale)


@_one_token.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _tokens(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    from selfspec_cli.vllm_plugin.vllm_names import _custom_ops as ops

    if is_fake(x):  # traced: plain operations, which can be fused
        scales = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(1e-12)
        tokens = (x.float() / scales).clamp(-LARGEST, LARGEST).to(weight.dtype)
    else:
        tokens, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
    return ops.cutlass_scaled_mm(tokens, weight.t(), scales, scale, out_dtype=x.dtype)


def experts(
    layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
) -> tuple[Any, Any, dict[str, Tensor]]:
    """vLLM's Triton kernels for experts with one scale a row and one a token (W8A8), for any number of tokens."""
    config = vllm.fp8_w8a8_moe_quant_config(
        w1_scale=w13["scale"], w2_scale=w2["scale"], per_act_token_quant=True, per_out_ch_quant=True, **activation
    )
    kernel = vllm.make_fp8_moe_kernel(
        moe_quant_config=config,
        moe_config=layer.moe_config,
        experts_cls=vllm.TritonExperts,
        fp8_backend=vllm.Fp8MoeBackend.TRITON,
    )
    tensors = {"w13_weight": w13["weight"], "w2_weight": w2["weight"]}
    return kernel, config, {**tensors, "w13_scale": w13["scale"], "w2_scale": w2["scale"]}
