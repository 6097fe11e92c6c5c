"""One token times copies of 4 and 8 bits as Marlin reads them (marlin.py): one layout for one token and for many.

Marlin's kernel is made for tiles of 16 tokens. Here the arithmetic of lowbit_one_token.py's kernel meets Marlin's
layout: the token is rounded to 8-bit integers, each group of it by its own largest magnitude, and `dp4a` multiplies and
adds four pairs of bytes at once. Measured on an H200 (gpu/lowbit.jsonl.xz/one_token_layouts_h200.json),
products of 8 to 26 us with Marlin's kernel and 8 bits take 0.7 to 1.0 of its time, with 4 bits 0.7 to 1.0 too.

The layout: a tile of 16 inputs and 64 outputs is 128 words, of 32 bits for copies of 4 bits and of 64 for those of 8.
Word 16 t + 4 q + j holds the weights of the inputs 2 q, 2 q + 8, 2 q + 1, 2 q + 9 for the outputs 16 j + t and
16 j + t + 8, as unsigned integers. With 4 bits the even bytes are the first output's and the odd ones the other's, and
the low half of a byte comes before its high half; with 8 bits the first output has the low 32 bits. Tiles with the
same inputs lie beside each other. The scales of 64 outputs are stored with output 8 a + b at place 8 b + a.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.vllm_plugin.weights.one_token import dp4a, four_bytes, launches_early, none_arrived

GROUP = tl.constexpr(64)  # inputs that share a scale
STEPS = tl.constexpr(4)  # tiles of a group
SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080: unsigned bytes become signed ones
TILE = 64  # outputs
MOST_PARTS, PROGRAMS = 16, 512  # to cut the inputs into, and to aim at; found on an H200


@triton.jit
def _round_token(
    x, rounded, less, factors, groups_of_row, GROUPS: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr
):
    """A token as words of the bytes of inputs 2 q, 2 q + 8, 2 q + 1, 2 q + 9 of each 16; -8 times the sum of those of a
    group with the same q, which 4 bits need; and the factor by which each group was divided."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # `_tile` waits for this kernel's end itself
        tl.extra.cuda.gdc_wait()
    group, word = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, GROUP // 4)
    valid = (group < groups_of_row)[:, None] & (word < GROUP // 4)[None, :]
    values = x + group[:, None] * GROUP + (word // 4 * 16 + word % 4 * 2)[None, :]
    x0 = tl.load(values, mask=valid, other=0.0).to(tl.float32)
    x8 = tl.load(values + 8, mask=valid, other=0.0).to(tl.float32)
    x1 = tl.load(values + 1, mask=valid, other=0.0).to(tl.float32)
    x9 = tl.load(values + 9, mask=valid, other=0.0).to(tl.float32)
    most = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x8), tl.abs(x9)))
    largest = tl.max(most, axis=1)  # [GROUPS]
    packed = four_bytes(x0, x8, x1, x9, tl.where(largest > 0, 127.0 / largest, 0.0)[:, None])
    ones = tl.full([GROUPS, GROUP // 4], 0x01010101, tl.int32)
    sums = dp4a(ones, packed, tl.zeros([GROUPS, GROUP // 4], tl.int32), ASM)
    tl.store(rounded + group[:, None] * (GROUP // 4) + word[None, :], packed, mask=valid)
    sums = tl.sum(tl.reshape(sums, [GROUPS, STEPS, 4]), axis=1)
    tl.store(less + group[:, None] * 4 + tl.arange(0, 4)[None, :], -8 * sums, mask=(group < groups_of_row)[:, None])
    tl.store(factors + group, largest * (1.0 / 127.0), mask=group < groups_of_row)


@triton.jit
def _words(words, tile, tiles, group, last, STEP: tl.constexpr):
    """The words [GROUPS, 128] of one tile of each group, int32 or int64; 0 from the group `last` on."""
    at = ((group * STEPS + STEP).to(tl.int64) * tiles + tile) * 128
    place = words + at[:, None] + tl.arange(0, 128)[None, :]
    return tl.load(place, mask=(group < last)[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def _times(word, low, high, rounded, group, last, STEP: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """`low` and `high` plus one tile of each group times the token: the lower output of each word, and the other."""
    at = (group * STEPS + STEP)[:, None] * 4 + (tl.arange(0, 128) // 4 % 4)[None, :]
    token = tl.load(rounded + at, mask=(group < last)[:, None], other=0)
    if BITS == 8:
        first, other = word.to(tl.int32) ^ SIGNS, (word >> 32).to(tl.int32) ^ SIGNS
    else:
        first = (word & 0x000F000F) | ((word << 4) & 0x0F000F00)
        other = ((word >> 8) & 0x000F000F) | ((word >> 4) & 0x0F000F00)
    return dp4a(first, token, low, ASM), dp4a(other, token, high, ASM)


@triton.jit
def _scaled(
    w0, w1, w2, w3, rounded, less, factors, scales, rows, tile, group, last, BITS: tl.constexpr, ASM: tl.constexpr
):
    """Four tiles of each group times the token, float32 [GROUPS, 128] twice."""
    here, lane = group < last, tl.arange(0, 128)
    if BITS == 8:
        low = tl.zeros([group.shape[0], 128], tl.int32)
    else:
        low = tl.load(less + group[:, None] * 4 + (lane // 4 % 4)[None, :], mask=here[:, None], other=0)
    low, high = _times(w0, low, low, rounded, group, last, 0, BITS, ASM)
    low, high = _times(w1, low, high, rounded, group, last, 1, BITS, ASM)
    low, high = _times(w2, low, high, rounded, group, last, 2, BITS, ASM)
    low, high = _times(w3, low, high, rounded, group, last, 3, BITS, ASM)
    place = scales + group[:, None] * rows + tile * 64 + (lane // 16 * 8 + lane % 4 * 2)[None, :]
    factor = tl.load(factors + group, mask=here, other=0.0)[:, None]
    low_scale = tl.load(place, mask=here[:, None], other=0.0).to(tl.float32) * factor
    high_scale = tl.load(place + 1, mask=here[:, None], other=0.0).to(tl.float32) * factor
    return low.to(tl.float32) * low_scale, high.to(tl.float32) * high_scale


@triton.jit
def _of_outputs(sums):
    """[GROUPS, 128] -> [8, 4]: of the outputs 16 j + t of a tile, summed over groups and inputs."""
    return tl.sum(tl.reshape(tl.sum(sums, axis=0), [8, 4, 4]), axis=1)


@triton.jit
def _tile(
    rounded,
    less,
    factors,
    words,
    scales,
    bias,
    out,
    partial,
    arrived,
    groups_of_row,
    rows,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """64 outputs of one of PARTS parts of the inputs, GROUPS groups at a time; the last part to arrive adds them up.

    partial: float32 [PARTS, rows]. arrived: int32, 0 for each tile, which is what it is left at.
    """
    tile, part, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    first = part * groups_of_row // PARTS
    last = (part + 1) * groups_of_row // PARTS
    group = first + tl.arange(0, GROUPS)
    w0, w1 = _words(words, tile, tiles, group, last, 0), _words(words, tile, tiles, group, last, 1)
    w2, w3 = _words(words, tile, tiles, group, last, 2), _words(words, tile, tiles, group, last, 3)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    low, high = _scaled(w0, w1, w2, w3, rounded, less, factors, scales, rows, tile, group, last, BITS, ASM)
    for start in tl.range(first + GROUPS, last, GROUPS):
        group = start + tl.arange(0, GROUPS)
        w0, w1 = _words(words, tile, tiles, group, last, 0), _words(words, tile, tiles, group, last, 1)
        w2, w3 = _words(words, tile, tiles, group, last, 2), _words(words, tile, tiles, group, last, 3)
        more = _scaled(w0, w1, w2, w3, rounded, less, factors, scales, rows, tile, group, last, BITS, ASM)
        low += more[0]
        high += more[1]
    output = tile * 64 + tl.arange(0, 4)[None, :] * 16 + tl.arange(0, 8)[:, None]
    low, high = _of_outputs(low), _of_outputs(high)
    complete = PARTS == 1
    if PARTS > 1:
        tl.store(partial + part * rows + output, low)
        tl.store(partial + part * rows + output + 8, high)
        tl.debug_barrier()  # all of the program's sums are there before it says so
        complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if complete:
        if PARTS > 1:
            low, high = tl.zeros_like(low), tl.zeros_like(high)
            for other in tl.static_range(PARTS):
                low += tl.load(partial + other * rows + output, cache_modifier=".cg")
                high += tl.load(partial + other * rows + output + 8, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
        if BIASED:
            low += tl.load(bias + output).to(tl.float32)
            high += tl.load(bias + output + 8).to(tl.float32)
        tl.store(out + output, low.to(out.dtype.element_ty))
        tl.store(out + output + 8, high.to(out.dtype.element_ty))


def product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    at_once: int = 4,
    parts: int | None = None,
    asm: bool = True,
    early: bool | None = None,
) -> Tensor:
    """One token in x [1, in], contiguous, times a repacked copy, plus bias [out] -> [1, out] in x's dtype.

    words, scales: int32 [in / 16, out * bits / 2] and [in / 64, out] of `marlin.repacked`. at_once: groups of a step of
    a program. parts: that the inputs are cut into; None: as many as pay. asm: False where there is no PTX (Triton's
    interpreter). early: launch the product while the token is rounded; None: where the device can.
    """
    groups, rows = scales.shape
    bits = 2 * words.shape[1] // rows
    early = launches_early(x.device) if early is None else early
    rounded = torch.empty(x.shape[1] // 4, dtype=torch.int32, device=x.device)
    less = torch.empty(groups, 4, dtype=torch.int32, device=x.device)
    factors = torch.empty(groups, dtype=torch.float32, device=x.device)
    _round_token[(triton.cdiv(groups, 4),)](
        x, rounded, less, factors, groups, GROUPS=4, ASM=asm, EARLY=early, num_warps=2, launch_pdl=early
    )
    parts = parts_for(rows) if parts is None else parts
    parts = min(parts, groups)
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    partial = torch.empty(parts, rows, dtype=torch.float32, device=x.device)
    _tile[(rows // TILE, parts)](
        rounded,
        less,
        factors,
        words if bits == 4 else words.view(torch.int64),
        scales,
        x if bias is None else bias,
        out,
        partial,
        none_arrived(x.device),
        groups,
        rows,
        BITS=bits,
        BIASED=bias is not None,
        PARTS=parts,
        GROUPS=at_once,
        ASM=asm,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def parts_for(rows: int) -> int:
    """The power of two nearest to what makes `PROGRAMS` programs of the tiles of a weight [rows, ...]."""
    return min(MOST_PARTS, 1 << max(0, round(math.log2(PROGRAMS * TILE / rows))))
