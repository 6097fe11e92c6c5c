"""Products with integer copies of weights, 4 to 8 bits each, in groups along a row with one scale a group.

Copies stay in the layout in which `early_exit.draft_weights.integers` writes them. One token is multiplied by the
kernel of lowbit_one_token.py, and 2 to 64 by that of lowbit_few_tokens.py where copies have 4 or 8 bits. More are
multiplied by the target's own weight, because products are bound by arithmetic then, and so are several where copies
have 5 or 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers
from selfspec_cli.vllm_plugin.weights import lowbit_few_tokens, lowbit_one_token
from selfspec_cli.vllm_plugin.weights.lowbit_one_token import width_of
from selfspec_cli.vllm_plugin.weights.one_token import none_arrived

COMPILE_SIZES = ()  # the operator chooses when it runs


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as they were made."""
    none_arrived(tensors["words"].device)  # not for the first time while a CUDA graph is captured
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor) -> Tensor:
    """x [n, in] bf16 times a copy of weight [out, in] -> [n, out], bias [out] included. CUDA only."""
    copy = (tensors["words"], tensors.get("more"), tensors["scales"])
    out: Tensor = torch.ops.selfspec.linear_integers(x, *copy, bias, weight)
    return out


# One operator for any number of tokens: what Dynamo traces once, with many, is also what one token runs through.
@torch.library.custom_op(
    "selfspec::linear_integers",
    mutates_args=(),
    schema="(Tensor x, Tensor words, Tensor? more, Tensor scales, Tensor? bias, Tensor weight) -> Tensor",
)
def _linear_integers(
    x: Tensor, words: Tensor, more: Tensor | None, scales: Tensor, bias: Tensor | None, weight: Tensor
) -> Tensor:
    tokens = x.shape[0]
    if tokens == 1:
        return lowbit_one_token.product(x.contiguous(), words, more, scales, bias)
    if tokens <= lowbit_few_tokens.MOST and width_of(words, more, x.shape[1]) in (4, 8):
        return lowbit_few_tokens.product(x.contiguous(), words, scales, bias)
    return F.linear(x, weight, bias)


@_linear_integers.register_fake
def _(x: Tensor, words: Tensor, more: Tensor | None, scales: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[0])


# ---- experts --------------------------------------------------------------------------------------------------------


def experts(
    layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
) -> tuple[Any, Any, dict[str, Tensor]]:
    """vLLM's Triton kernels for experts of 4 and of 8 bits (W4A16, W8A16), for any number of tokens.

    They know no other widths: integers of 5 and 6 bits take 8 there.
    """
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonWNA16Experts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import (
        WNA16MoEBackend,
        make_wna16_moe_kernel,
        make_wna16_moe_quant_config,
    )

    bits = 4 if _width_of_copy(w13) == 4 else 8
    config = make_wna16_moe_quant_config(
        w1_scale=w13["scales"],
        w2_scale=w2["scales"],
        group_size=GROUP,
        num_bits=bits,
        **activation,
    )
    kernel = make_wna16_moe_kernel(
        moe_quant_config=config,
        moe_config=layer.moe_config,
        experts_cls=TritonWNA16Experts,
        backend=WNA16MoEBackend.TRITON,
        routing_tables=layer._expert_routing_tables(),
    )
    tensors = {"w13_weight": as_bytes(w13, bits), "w2_weight": as_bytes(w2, bits)}
    return kernel, config, {**tensors, "w13_scale": w13["scales"], "w2_scale": w2["scales"]}


def as_bytes(copies: Mapping[str, Tensor], bits: int) -> Tensor:
    """Copies of experts as vLLM's kernels read them, uint8: q + 128 in [experts, out, in] for 8 bits; for 4, q + 8 of
    two columns in [experts, out, in / 2], the first in the low half. One expert at a time, because unpacked integers
    take much memory."""
    width, packed = _width_of_copy(copies), []
    for number in range(len(copies["scales"])):
        q = integers({name: tensor[number] for name, tensor in copies.items()}, width).flatten(1)  # int32 [out, in]
        if bits == 8:
            packed.append((q + 128).to(torch.uint8))
        else:
            packed.append(((q[:, ::2] + 8) | ((q[:, 1::2] + 8) << 4)).to(torch.uint8))
    return torch.stack(packed)


def _width_of_copy(copies: Mapping[str, Tensor]) -> int:
    """Bits of the integers of copies [experts, ...]."""
    return width_of(copies["words"][0], copies.get("more"), copies["scales"].shape[2] * GROUP)
