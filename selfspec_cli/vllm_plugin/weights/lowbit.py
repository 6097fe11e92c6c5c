"""Products with integer copies of weights, 4 or 8 bits each, in groups along a row with one scale a group.

Copies stay in the layout in which `early_exit.draft_weights.integers` writes them. One token is multiplied by the
kernel of lowbit_one_token.py, and 2 to 32 by that of lowbit_few_tokens.py. The tokens are rounded to 8 bits before
(rounding.py), in a compiled layer by the norm or the activation in front (fused.py).

Engines for more than 32 requests also keep copies as Marlin reads them, for 33 to 64 tokens: of the lm_head, and of the
layers of models that fused_step/ does not know. It computes all layers as one kernel, from layouts of its own. The
kernel is chosen when a step runs, so a step of eight or 32 requests has the same kernels in an engine for 256 requests
as in one for eight or 32. Alone Marlin's kernels are as fast as ours at 17 to 32 tokens, but steps of 32 took longer
with them (results/LOG.md, "What does a server of a pretrained coder gain?"). Measured on an H100
(gpu/lowbit.jsonl.xz/products_h100.json), ours over Marlin's in the products of two shapes of layer: one token
0.35 to 0.9, 4 tokens 0.5 to 1.0, 16 tokens 0.6 to 1.1, 32 tokens 0.7 to 1.5, 64 tokens 0.7 to 1.7.
"""

from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP, Integers, integers
from selfspec_cli.vllm_plugin.weights import fused, lowbit_few_tokens, lowbit_one_token, rounding
from selfspec_cli.vllm_plugin.weights.lowbit_one_token import width_of
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

COMPILE_SIZES = ()  # the operator chooses when it runs
SECOND_LAYOUT = ("marlin_words", "marlin_scales")


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as they were made, and on engines for many requests as Marlin reads them too (module docstring)."""
    rows, groups = tensors["scales"].shape
    bits = width_of(tensors["words"], groups * GROUP)
    none_arrived(tensors["words"].device)  # not for the first time while a CUDA graph is captured
    found = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if marlin_serves(bits, rows, groups * GROUP) and _many_requests_at_a_time():
        found |= zip(SECOND_LAYOUT, repacked(tensors, bits), strict=True)
    return found


activation, graph_pass = fused.activation, fused.graph_pass


def _many_requests_at_a_time() -> bool:
    from selfspec_cli.vllm_plugin.vllm_names import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.scheduler_config.max_num_seqs > rounding.MOST


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
    """x [n, in] bf16 times what `prepare` made of weight [out, in] -> [n, out], bias [out] included. CUDA only."""
    copy, second = (tensors["words"], tensors["scales"]), [tensors.get(name) for name in SECOND_LAYOUT]
    out: Tensor = torch.ops.selfspec.linear_integers(x, None, None, *copy, bias, weight, *second)
    return out


# One operator for any number of tokens: what Dynamo traces once, with many, is also what one token runs through.
# rounded, factors: the tokens as rounding.py gives them, where fused.py has them made in front; None: round them here.
# marlin_words, marlin_scales: the same copy as Marlin reads it, where it is kept.
@torch.library.custom_op(
    "selfspec::linear_integers",
    mutates_args=(),
    schema="(Tensor x, Tensor? rounded, Tensor? factors, Tensor words, Tensor scales, Tensor? bias, Tensor? weight, "
    "Tensor? marlin_words, Tensor? marlin_scales) -> Tensor",
)
def _linear_integers(
    x: Tensor,
    rounded: Tensor | None,
    factors: Tensor | None,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    marlin_words: Tensor | None,
    marlin_scales: Tensor | None,
) -> Tensor:
    tokens, bits = x.shape[0], width_of(words, x.shape[1])
    if tokens > rounding.MOST:
        if marlin_words is not None and marlin_scales is not None and (tokens <= MOST_OF_MARLIN or weight is None):
            return marlin_product(x.contiguous(), marlin_words, marlin_scales, bias)
        if weight is None:  # of vLLM's dummy runs, or of a shape that Marlin has no kernel for
            weight = Integers(bits).dequantise({"words": words, "scales": scales}, x.dtype)
        return F.linear(x, weight, bias)
    if rounded is None or factors is None:
        rounded, factors = rounding.round_tokens(x.contiguous(), bits)
    return _product(tokens, rounded, factors, words, scales, bias, x.dtype)


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


# ---- Marlin, vLLM's kernels for integer weights ---------------------------------------------------------------------

MOST_OF_MARLIN = 64  # tokens; with more, products are bound by arithmetic, and the target's own weight is as fast
ROWS = 8192  # unpacked at once, so that the integers of an lm_head take little memory compared with it


def marlin_serves(bits: int, rows: int, columns: int) -> bool:
    """Whether Marlin has a kernel for copies [rows, columns]; others would have to be padded at each step."""
    whole_tiles = (rows % 64 == 0 and columns % 128 == 0) or (rows % 128 == 0 and columns % 64 == 0)
    return bits in (4, 8) and whole_tiles


def repacked(copy: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
    """A copy of `draft_weights.integers` on a CUDA device as Marlin reads it: words, and scales in bfloat16."""
    from selfspec_cli.vllm_plugin.vllm_names import _custom_ops as ops
    from selfspec_cli.vllm_plugin.vllm_names import marlin_permute_scales

    rows, groups = copy["scales"].shape
    words = ops.gptq_marlin_repack(along_columns(copy, bits), groups * GROUP, rows, bits)
    scales = copy["scales"].t().to(torch.bfloat16).contiguous()
    _beside(words.device)  # not first while a CUDA graph is captured
    return words, marlin_permute_scales(scales, groups * GROUP, rows, GROUP)


def along_columns(copy: Mapping[str, Tensor], bits: int) -> Tensor:
    """A copy as GPTQ checkpoints store it: int32 [in * bits / 32, out], the first column's q + 2^(bits-1) lowest."""
    parts = []
    for start in range(0, len(copy["scales"]), ROWS):
        some = {name: tensor[start : start + ROWS] for name, tensor in copy.items()}
        unsigned = (integers(some, bits).flatten(1) + 2 ** (bits - 1)).t().unflatten(0, (-1, 32 // bits))
        fields = [unsigned[:, place] << (bits * place) for place in range(32 // bits)]
        parts.append(reduce(torch.bitwise_or, fields))
    return torch.cat(parts, dim=1).contiguous()


def marlin_product(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] bf16, contiguous, times a repacked copy, plus bias [out] -> [n, out] bf16."""
    from selfspec_cli.vllm_plugin.vllm_names import marlin_utils, scalar_types

    rows, columns = scales.shape[1], x.shape[1]
    bits = 2 * words.shape[1] // rows  # words are [in / 16, out * bits / 2]
    kind = scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128
    empty, locks = _beside(x.device)
    out: Tensor = marlin_utils.apply_gptq_marlin_linear(x, words, scales, empty, locks, kind, rows, columns)
    return out if bias is None else out + bias


@lru_cache
def _beside(device: torch.device) -> tuple[Any, Any]:
    """What a call takes besides: no zero points, and locks, which each call leaves as it finds them."""
    from selfspec_cli.vllm_plugin.vllm_names import marlin_utils

    locks = marlin_utils.marlin_make_workspace_new(device, marlin_utils.MARLIN_MAX_BLOCKS_PER_SM)
    return marlin_utils.marlin_make_empty(device), locks


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
