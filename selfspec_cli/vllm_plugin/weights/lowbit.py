"""Products with integer copies of weights, 4 to 8 bits each, in groups along a row with one scale a group.

Where Marlin has a kernel (marlin.py) its layout is taken. What is here is for one token, times 5 and 6 bits, times any
width in an engine for one request, and times shapes that Marlin does not take.

At one token nothing but reading the weight should take time, and with fewer bits there are fewer bytes to hide the
arithmetic behind. So the token is rounded to 8-bit integers too, each group of it by its own largest magnitude, and
`dp4a` multiplies and adds four pairs of bytes at once: a word of eight 4-bit weights takes two of them, two masks and a
shift. A first kernel rounds the token once, in about 1.4 us, and a warp for each row does the rest. Measured on an H200
(results/LOG.md): of the rate at which the card copies memory, 4 bits reach 1.07 to 1.2 in large products, which only
read, and 0.6 to 0.7 in small ones. From compute capability 9.0 on, the second kernel can start with the first and read
its weights while the token is rounded (programmatic dependent launch), because they do not depend on it: the four
products of a layer of Llama 3 8B take 47.8 us then, and 50.3 without.

Layout of a copy (`early_exit.draft_weights.integers` writes it): a word holds one weight of each of the eight equal
parts of a group, so that a token's values load as contiguous parts. Byte b of a word: part b in the low four bits, part
b + 4 in the high ones. What 5 and 6 bits need beyond 4 lies apart, eight fields of one or two bits a word. With 8 bits
a group has two runs of words, of parts 0 to 3 and of parts 4 to 7.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP as GROUP_OF_COPIES
from selfspec_cli.early_exit.draft_weights.integers import integers
from selfspec_cli.vllm_plugin.weights import marlin
from selfspec_cli.vllm_plugin.weights.one_token import dp4a, four_bytes, launches_early

PARTS = tl.constexpr(8)


@triton.jit
def _once(place, inside, WHOLE: tl.constexpr):
    """What lies at `place`, which is read once a step; 0 where `inside` is false."""
    if WHOLE:
        return tl.load(place, eviction_policy="evict_first")
    return tl.load(place, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _low_and_high(words, more, at, inside, WIDTH: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """Bytes of parts 0 to 3 and of parts 4 to 7 of each word, as unsigned integers (signed ones for 8 bits).

    at: of each word, the number of its group times WIDTH, plus its place; inside: which there are (not looked at where
    WHOLE says that all are).
    """
    if BITS == 8:
        pair = words + 2 * at - at % WIDTH
        low, high = _once(pair, inside, WHOLE), _once(pair + WIDTH, inside, WHOLE)
    else:
        word = _once(words + at, inside, WHOLE)
        low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    if BITS == 5:  # four bits spread to four bytes
        top = _once(more + at, inside, WHOLE).to(tl.int32)
        low |= (((top & 0xF) * 0x00204081) & 0x01010101) << 4
        high |= ((((top >> 4) & 0xF) * 0x00204081) & 0x01010101) << 4
    if BITS == 6:  # four pairs of bits spread to four bytes
        top = _once(more + at, inside, WHOLE).to(tl.int32) & 0xFFFF
        first, second = top & 0xFF, top >> 8
        low |= ((first | (first << 6) | (first << 12) | (first << 18)) & 0x03030303) << 4
        high |= ((second | (second << 6) | (second << 12) | (second << 18)) & 0x03030303) << 4
    return low, high


@triton.jit
def _round_token(
    x,
    rounded,
    factors,
    groups_of_row,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A token as bytes: of each group the words of parts 0 to 3, those of parts 4 to 7, and -OFFSET times their sums;
    and the factor by which the group was divided."""
    WIDTH: tl.constexpr = GROUP // PARTS  # words of a group
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # `_one_row` waits for this kernel's end itself
        tl.extra.cuda.gdc_wait()
    group, word = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    valid = (group < groups_of_row)[:, None] & (word < WIDTH)[None, :]
    values = x + group[:, None] * GROUP + word[None, :]
    x0 = tl.load(values + 0 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x1 = tl.load(values + 1 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x2 = tl.load(values + 2 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x3 = tl.load(values + 3 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x4 = tl.load(values + 4 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x5 = tl.load(values + 5 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x6 = tl.load(values + 6 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    x7 = tl.load(values + 7 * WIDTH, mask=valid, other=0.0).to(tl.float32)
    most = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    most = tl.maximum(most, tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7))))
    largest = tl.max(most, axis=1)  # [GROUPS]
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)[:, None]
    low, high = four_bytes(x0, x1, x2, x3, inverse), four_bytes(x4, x5, x6, x7, inverse)
    ones = tl.full([GROUPS, WIDTH], 0x01010101, tl.int32)
    zeros = tl.zeros([GROUPS, WIDTH], tl.int32)
    less = -OFFSET * dp4a(ones, high, dp4a(ones, low, zeros, ASM), ASM)
    place = rounded + group[:, None] * (3 * WIDTH) + word[None, :]
    tl.store(place, low, mask=valid)
    tl.store(place + WIDTH, high, mask=valid)
    tl.store(place + 2 * WIDTH, less, mask=valid)
    tl.store(factors + group, largest * (1.0 / 127.0), mask=group < groups_of_row)


@triton.jit
def _weights(
    words,
    more,
    scales,
    row_start,
    groups,
    groups_of_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """`_low_and_high` of some groups of a row, and the scale of each."""
    WIDTH: tl.constexpr = GROUP // PARTS
    word = tl.arange(0, WIDTH)
    here = groups < groups_of_row
    at = (row_start + groups)[:, None] * WIDTH + word[None, :]
    valid = here[:, None] & (word < WIDTH)[None, :]
    low, high = _low_and_high(words, more, at, valid, WIDTH, BITS, WHOLE)
    return low, high, _once(scales + row_start + groups, here, WHOLE).to(tl.float32)


@triton.jit
def _times_token(low, high, scale, rounded, factors, groups, groups_of_row, GROUP: tl.constexpr, ASM: tl.constexpr):
    """Some groups of a row times the token, float32 [GROUPS, WIDTH]; their sum is the product."""
    WIDTH: tl.constexpr = GROUP // PARTS
    word = tl.arange(0, WIDTH)
    here = groups < groups_of_row
    valid = here[:, None] & (word < WIDTH)[None, :]
    place = rounded + groups[:, None] * (3 * WIDTH) + word[None, :]
    products = tl.load(place + 2 * WIDTH, mask=valid, other=0)
    products = dp4a(low, tl.load(place, mask=valid, other=0), products, ASM)
    products = dp4a(high, tl.load(place + WIDTH, mask=valid, other=0), products, ASM)
    both = scale * tl.load(factors + groups, mask=here, other=0.0)
    return products.to(tl.float32) * both[:, None]


@triton.jit
def _one_row(
    rounded,
    factors,
    words,
    more,
    scales,
    bias,
    out,
    groups_of_row,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program, which is one warp, multiplies a token that `_round_token` wrote by one row, GROUPS of it at a time.

    EARLY: it is launched with `_round_token`, and reads its first weights before it waits for the token.
    """
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    row_start = row.to(tl.int64) * groups_of_row
    low, high, scale = _weights(words, more, scales, row_start, groups, groups_of_row, BITS, GROUP, WHOLE)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    sums = _times_token(low, high, scale, rounded, factors, groups, groups_of_row, GROUP, ASM)
    for start in tl.range(GROUPS, groups_of_row, GROUPS):
        groups = start + tl.arange(0, GROUPS)
        low, high, scale = _weights(words, more, scales, row_start, groups, groups_of_row, BITS, GROUP, WHOLE)
        sums += _times_token(low, high, scale, rounded, factors, groups, groups_of_row, GROUP, ASM)
    total = tl.sum(tl.sum(sums, axis=1), axis=0)
    if BIASED:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


ROUNDED_AT_ONCE = 8  # groups of a program
GROUPS_AT_ONCE = {4: 32, 5: 32, 6: 32, 8: 8}  # by bits; found on an H200 (experiments/kernels/tune_kernels.py)

COMPILE_SIZES = ()  # the operator chooses when it runs


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of 4 and 8 bits as Marlin reads them, all others as they were made.

    In an engine that runs one request at a time every copy stays as it was made: the kernels here take less time for
    one token in most products. Both layouts at once would double what the copy takes of memory.
    """
    rows, groups = tensors["scales"].shape
    bits = width_of(tensors["words"], tensors.get("more"), groups * GROUP_OF_COPIES)
    if marlin.serves(bits, rows, groups * GROUP_OF_COPIES) and not _one_request_at_a_time():
        return marlin.repacked(tensors, bits)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _one_request_at_a_time() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.scheduler_config.max_num_seqs == 1


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor) -> Tensor:
    """x [n, in] bf16 times what `prepare` returned -> [n, out], bias [out] included. CUDA only.

    Of a copy that is no Marlin's only one token is multiplied. More are multiplied by the target's own weight
    [out, in]: for four tokens this way of doing it was 1.5 times as fast as bf16 at best, and kernels for them take
    minutes to compile.
    """
    if "marlin" in tensors:
        return marlin.linear(x, tensors, bias, weight)
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
    if x.shape[0] > 1:
        return F.linear(x, weight, bias)
    return product(x.contiguous(), words, more, scales, bias)


@_linear_integers.register_fake
def _(x: Tensor, words: Tensor, more: Tensor | None, scales: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[0])


def width_of(words: Tensor, more: Tensor | None, columns: int) -> int:
    """Bits of a copy's integers, by its tensors; columns: of the weight."""
    if more is not None:
        return 5 if more.dtype is torch.uint8 else 6
    return 8 if words.shape[1] * 4 == columns else 4


def product(
    x: Tensor,
    words: Tensor,
    more: Tensor | None,
    scales: Tensor,
    bias: Tensor | None = None,
    at_once: int | None = None,
    asm: bool = True,
    early: bool | None = None,
) -> Tensor:
    """One token in x [1, in] times a copy [out, in], plus bias [out] -> [1, out] in x's dtype.

    x is contiguous. at_once: groups of a step of a program; None: as many as pay. asm: False where there is no PTX
    (Triton's interpreter).
    early: launch the product while the token is rounded; None: where the device can.
    """
    early = launches_early(x.device) if early is None else early
    columns, (rows, groups) = x.shape[1], scales.shape
    bits, group = width_of(words, more, columns), columns // groups
    at_once = at_once or GROUPS_AT_ONCE[bits]
    rounded = torch.empty(3 * columns // PARTS.value, dtype=torch.int32, device=x.device)
    factors = torch.empty(groups, dtype=torch.float32, device=x.device)
    _round_token[(triton.cdiv(groups, ROUNDED_AT_ONCE),)](
        x,
        rounded,
        factors,
        groups,
        OFFSET=0 if bits == 8 else 2 ** (bits - 1),
        GROUP=group,
        GROUPS=ROUNDED_AT_ONCE,
        ASM=asm,
        EARLY=early,
        num_warps=2,
        launch_pdl=early,
    )
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _one_row[(rows,)](
        rounded,
        factors,
        words,
        words if more is None else more,
        scales,
        x if bias is None else bias,
        out,
        groups,
        BIASED=bias is not None,
        BITS=bits,
        GROUP=group,
        WHOLE=groups % at_once == 0,
        GROUPS=at_once,
        ASM=asm,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return out


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
        group_size=GROUP_OF_COPIES,
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
    return width_of(copies["words"][0], copies.get("more"), copies["scales"].shape[2] * GROUP_OF_COPIES)
