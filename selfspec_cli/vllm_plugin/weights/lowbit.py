"""Products with integer copies of weights, 4 or 8 bits each, in groups along a row with one scale a group.

Copies stay in the layout in which `early_exit.draft_weights.integers` writes them. One token is multiplied by the
kernel of lowbit_one_token.py, and 2 to 32 by that of lowbit_few_tokens.py, which takes 33 to 64 in two turns. With
more, products are bound by arithmetic, and the target's own weight is as fast, where the target has it. The tokens are
rounded to 8 bits before (rounding.py), in a compiled layer by the norm or the activation in front (fused.py).

These are the products of the lm_head, and of the layers of models that fused_step/ does not know: it computes all
layers as one kernel, from layouts of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers
from selfspec_cli.vllm_plugin.weights import fused, lowbit_few_tokens, lowbit_one_token, rounding
from selfspec_cli.vllm_plugin.weights.lowbit_one_token import width_of
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

COMPILE_SIZES = ()  # the operator chooses when it runs
MOST = 2 * rounding.MOST


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as they were made."""
    none_arrived(tensors["words"].device)  # not for the first time while a CUDA graph is captured
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


activation, graph_pass = fused.activation, fused.graph_pass


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
    """x [n, in] bf16 times what `prepare` made of weight [out, in] -> [n, out], bias [out] included. CUDA only."""
    out: Tensor = torch.ops.selfspec.linear_integers(x, None, None, tensors["words"], tensors["scales"], bias, weight)
    return out


# One operator for any number of tokens: what Dynamo traces once, with many, is also what one token runs through.
# rounded, factors: the tokens as rounding.py gives them, where fused.py has them made in front; None: round them here.
@torch.library.custom_op(
    "selfspec::linear_integers",
    mutates_args=(),
    schema="(Tensor x, Tensor? rounded, Tensor? factors, Tensor words, Tensor scales, Tensor? bias, Tensor? weight) "
    "-> Tensor",
)
def _linear_integers(
    x: Tensor,
    rounded: Tensor | None,
    factors: Tensor | None,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
) -> Tensor:
    tokens, bits = x.shape[0], width_of(words, x.shape[1])
    if tokens > MOST and weight is not None:
        return F.linear(x, weight, bias)
    if tokens > rounding.MOST:
        parts = (_rounded_product(part, bits, words, scales, bias) for part in x.contiguous().split(rounding.MOST))
        return torch.cat(list(parts))
    if rounded is None or factors is None:
        return _rounded_product(x.contiguous(), bits, words, scales, bias)
    return _product(tokens, rounded, factors, words, scales, bias, x.dtype)


def _rounded_product(x: Tensor, bits: int, words: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], contiguous, of 1 to rounding.MOST tokens, rounded here."""
    return _product(x.shape[0], *rounding.round_tokens(x, bits), words, scales, bias, x.dtype)


def _product(tokens: int, rounded: Tensor, factors: Tensor, *others: Any, **more: Any) -> Tensor:
    """Product of `tokens` rounded tokens; the other arguments are those of both kernels' functions."""
    if tokens == 1:
        return lowbit_one_token.product(rounded, factors, *others, **more)
    return lowbit_few_tokens.product(rounded, factors, tokens, *others, **more)


def compile_for(tokens: int, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
    """Compile what `linear` launches for `tokens` tokens of `dtype`, and launch nothing."""
    if tokens > rounding.MOST:
        return
    words, scales = tensors["words"], tensors["scales"]
    groups = scales.shape[1]
    rounded, factors = rounding.room_for(groups, rounding.padded(tokens), words.device)
    _product(tokens, rounded, factors, words, scales, bias, dtype, only_compile=True)


@_linear_integers.register_fake
def _(x: Tensor, rounded: Any, factors: Any, words: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0])


# ---- experts --------------------------------------------------------------------------------------------------------


def experts(
    layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
) -> tuple[Any, Any, dict[str, Tensor]]:
    """vLLM's Triton kernels for experts of 4 and of 8 bits (W4A16, W8A16), for any number of tokens."""
    from selfspec_cli.vllm_plugin.vllm_names import (
        TritonWNA16Experts,
        WNA16MoEBackend,
        make_wna16_moe_kernel,
        make_wna16_moe_quant_config,
    )

    bits = _width_of_copy(w13)
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
    )
    tensors = {"w13_weight": as_bytes(w13), "w2_weight": as_bytes(w2)}
    return kernel, config, {**tensors, "w13_scale": w13["scales"], "w2_scale": w2["scales"]}


def as_bytes(copies: Mapping[str, Tensor]) -> Tensor:
    """Copies of experts as vLLM's kernels read them, uint8: q + 128 in [experts, out, in] for 8 bits; for 4, q + 8 of
    two columns in [experts, out, in / 2], the first in the low half. One expert at a time, because unpacked integers
    take much memory."""
    bits, packed = _width_of_copy(copies), []
    for number in range(len(copies["scales"])):
        q = integers({name: tensor[number] for name, tensor in copies.items()}, bits).flatten(1)  # int32 [out, in]
        if bits == 8:
            packed.append((q + 128).to(torch.uint8))
        else:
            packed.append(((q[:, ::2] + 8) | ((q[:, 1::2] + 8) << 4)).to(torch.uint8))
    return torch.stack(packed)


def _width_of_copy(copies: Mapping[str, Tensor]) -> int:
    """Bits of the integers of copies [experts, ...]."""
    return width_of(copies["words"][0], copies["scales"].shape[2] * GROUP)
