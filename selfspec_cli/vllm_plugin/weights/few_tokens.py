"""2 to 32 tokens times integer copies of 4 and 8 bits, by tensor cores in 8-bit integers.

With few tokens nothing but reading the weight should take time. So weights go from memory straight to the registers of
which a tensor core multiplies them. That works because any order of the 64 inputs of a group will do, as long as
weights and tokens have the same. In an `mma` of 16 rows, 8 tokens and 32 inputs, lane 4 r + t of a warp holds inputs of
rows r and r + 8 and of token r; it is given the t-th quarter of the bytes that each row has for a group: 16 contiguous
bytes with 8 bits, 8 with 4. Tokens have been rounded to signed bytes before, in the same order (rounding.py). Integers
of 4 bits are multiplied as 16 times themselves, which a mask makes of both halves of a byte, and their sign bits come
right by one exclusive or in the same instruction.

A warp multiplies ROWS rows by one group of all tokens at a time. The warps of a program have different groups, or
different rows too where there are more rows than a warp takes; `tl.dot` knows that as a batch. The layout in which
Triton loads tensors is the one in which it multiplies them: nothing passes through shared memory before the sums of the
warps are added. Only the time depends on that; tests/unit/test_v2_kernels.py looks for it."""


# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP as GROUP_OF_COPIES
from selfspec_cli.vllm_plugin.weights.rounding import MOST_TILES, launcher, launches_early, none_arrived, padded

GROUP = tl.constexpr(GROUP_OF_COPIES)  # inputs that share a scale


@triton.jit
def _halves(packed, ASM: tl.constexpr):
    """16 times the integers in the low and in the high halves of bytes, which hold them plus 8."""
    if ASM:
        # 0x6A is (a & b) ^ c
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 up;
            shl.b32 up, $2, 4;
            lop3.b32 $0, up, 0xF0F0F0F0, 0x80808080, 0x6A;
            lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
            }""",
            "=&r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    wide = packed.to(tl.int32)
    return (((wide & 15) - 8) * 16).to(tl.int8), ((((wide >> 4) & 15) - 8) * 16).to(tl.int8)


@triton.jit
def _weights(
    words,
    scales,
    first_row,
    start,
    last,
    groups_of_row,
    rows,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Of each warp, a group of ROWS rows: bytes [ROWS / 8 * WARPS * 32, 2 * BITS], and the scale of each."""
    BYTES: tl.constexpr = 2 * BITS
    lane = tl.arange(0, ROWS // 8 * WARPS * 32)  # of a warp of some 8 rows
    warp = lane // 32 % WARPS
    row = first_row + warp // ALONG * ROWS + lane // (32 * WARPS) * 8 + lane // 4 % 8
    group = start + warp % ALONG
    inside = group < last
    if not WHOLE:
        inside = inside & (row < rows)
    at = row.to(tl.int64) * groups_of_row + group
    place = words + (at * (4 * BYTES) + lane % 4 * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    packed = tl.load(place, mask=inside[:, None], other=0, eviction_policy="evict_first")
    return packed, tl.load(scales + at, mask=inside, other=0.0)


@triton.jit
def _some_weights(
    words,
    scales,
    first_row,
    start,
    last,
    groups_of_row,
    rows,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """`_weights` AT_ONCE times."""
    held = (_weights(words, scales, first_row, start, last, groups_of_row, rows, BITS, WHOLE, ROWS, WARPS, ALONG),)
    for step in tl.static_range(1, AT_ONCE):
        at = start + step * ALONG
        more = _weights(words, scales, first_row, at, last, groups_of_row, rows, BITS, WHOLE, ROWS, WARPS, ALONG)
        held += (more,)  # type: ignore[assignment]
    return held


@triton.jit
def _tokens(
    rounded,
    factors,
    start,
    last,
    tokens,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Of each warp, a group of all tokens as rounding.py wrote them: bytes of parts 0 to 3, and of 4 to 7 (all of
    them twice, for 8 bits); and factors [WARPS, 1, 8, TOKENS]."""
    lane = tl.arange(0, TOKENS // 8 * WARPS * 32)  # of a warp of some 8 tokens
    group, first = start + lane // 32 % WARPS % ALONG, lane // (32 * WARPS) * 8
    token = first + lane // 4 % 8
    inside = (group < last) & (token < tokens)
    place = rounded + ((group * TOKENS + token) * 64 + lane % 4 * 16)[:, None]
    if BITS == 8:
        low = tl.load(place + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)
        high = low
    else:
        low = tl.load(place + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0)
        high = tl.load(place + 8 + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0)
    place = factors + (group * TOKENS + first + lane % 4 * 2)[:, None] + tl.arange(0, 2)[None, :]
    factor = tl.load(place, mask=(group < last)[:, None], other=0.0)
    factor = tl.permute(tl.reshape(factor, [TOKENS // 8, WARPS, 8, 4, 2]), (1, 2, 0, 3, 4))
    return low, high, tl.reshape(factor, [WARPS, 1, 8, TOKENS])


@triton.jit
def _rows_as_matrix(packed, J: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    split = tl.reshape(packed, [ROWS // 8, WARPS, 8, 4, J, 4])
    return tl.reshape(tl.permute(split, (1, 0, 2, 4, 3, 5)), [WARPS, ROWS, 16 * J])


@triton.jit
def _tokens_as_matrix(packed, J: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    split = tl.reshape(packed, [TOKENS // 8, WARPS, 8, 4, J, 4])
    return tl.reshape(tl.permute(split, (1, 4, 3, 5, 0, 2)), [WARPS, 16 * J, TOKENS])


@triton.jit
def _product(
    packed,
    scale,
    low,
    high,
    factor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of each warp, a group of rows times all tokens, float32 [WARPS, ROWS, TOKENS]."""
    J: tl.constexpr = BITS // 2
    if BITS == 8:
        weights = _rows_as_matrix(packed, J, ROWS, WARPS)
        found = tl.dot(weights, _tokens_as_matrix(low, J, TOKENS, WARPS), out_dtype=tl.int32)
    else:
        low_weights, high_weights = _halves(packed, ASM)
        low_weights = _rows_as_matrix(low_weights, J, ROWS, WARPS)
        high_weights = _rows_as_matrix(high_weights, J, ROWS, WARPS)
        found = tl.dot(low_weights, _tokens_as_matrix(low, J, TOKENS, WARPS), out_dtype=tl.int32)
        found = tl.dot(high_weights, _tokens_as_matrix(high, J, TOKENS, WARPS), acc=found, out_dtype=tl.int32)
    found = tl.reshape(found.to(tl.float32), [WARPS, ROWS // 8, 8, TOKENS]) * factor
    found = tl.reshape(found, [WARPS, ROWS // 8, 8, TOKENS // 8, 4, 2])
    scale = tl.permute(tl.reshape(scale.to(tl.float32), [ROWS // 8, WARPS, 8, 4]), (1, 0, 2, 3))
    found *= tl.reshape(scale, [WARPS, ROWS // 8, 8, 1, 4, 1])
    return tl.reshape(found, [WARPS, ROWS, TOKENS])


@triton.jit
def _some_products(
    held,
    rounded,
    factors,
    start,
    last,
    tokens,
    sums,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ASM: tl.constexpr,
):
    """`sums` plus the weights that `_some_weights` loaded times tokens."""
    given = (_tokens(rounded, factors, start, last, tokens, BITS, TOKENS, WARPS, ALONG),)
    for step in tl.static_range(1, AT_ONCE):
        at = start + step * ALONG
        given += (_tokens(rounded, factors, at, last, tokens, BITS, TOKENS, WARPS, ALONG),)  # type: ignore[assignment]
    tl.debug_barrier()  # or the last loads would come after the first products, which wait for the first loads
    for step in tl.static_range(AT_ONCE):
        packed, scale = held[step]
        low, high, factor = given[step]
        sums += _product(packed, scale, low, high, factor, BITS, ROWS, TOKENS, WARPS, ASM)
    return sums


@triton.jit
def _all_parts(partial, size, inside, PARTS: tl.constexpr, HELD: tl.constexpr):
    """The sum over all parts, each `size` after the one before. HELD: registers hold what all of them found."""
    sums = tl.zeros(inside.shape, tl.float32)
    if HELD:
        for part in tl.static_range(PARTS):
            sums += tl.load(partial + part * size, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        for part in tl.range(PARTS):
            sums += tl.load(partial + part * size, mask=inside, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _some_rows(
    rounded,
    factors,
    words,
    scales,
    bias,
    out,
    partial,
    arrived,
    tokens,
    groups_of_row,
    rows,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    ACROSS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LOOPS: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ACROSS * ROWS rows of one of PARTS parts of the inputs; the last part adds them up. partial: float32 [PARTS,
    tokens, rows]. arrived: int32, left at 0. EARLY: launched with `_round_tokens`, whose tokens it waits for."""
    ALONG: tl.constexpr = WARPS // ACROSS  # groups that the warps multiply together
    tile, part = tl.program_id(0), tl.program_id(1)
    first = part * groups_of_row // PARTS
    last = (part + 1) * groups_of_row // PARTS
    first_row = tile * (ROWS * ACROSS)
    held = _some_weights(
        words, scales, first_row, first, last, groups_of_row, rows, BITS, WHOLE, ROWS, WARPS, ALONG, AT_ONCE
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before all kernels in front have ended: what comes next may read what they wrote without waiting.
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros([WARPS, ROWS, TOKENS], tl.float32)
    sums = _some_products(
        held, rounded, factors, first, last, tokens, sums, BITS, ROWS, TOKENS, WARPS, ALONG, AT_ONCE, ASM
    )
    if LOOPS:
        for start in tl.range(first + ALONG * AT_ONCE, last, ALONG * AT_ONCE):
            held = _some_weights(
                words, scales, first_row, start, last, groups_of_row, rows, BITS, WHOLE, ROWS, WARPS, ALONG, AT_ONCE
            )
            sums = _some_products(
                held, rounded, factors, start, last, tokens, sums, BITS, ROWS, TOKENS, WARPS, ALONG, AT_ONCE, ASM
            )
    sums = tl.sum(tl.reshape(sums, [ACROSS, ALONG, ROWS, TOKENS]), axis=1)
    sums = tl.reshape(sums, [ACROSS * ROWS, TOKENS])
    row, token = first_row + tl.arange(0, ACROSS * ROWS), tl.arange(0, TOKENS)
    inside = (row < rows)[:, None] & (token < tokens)[None, :]
    output = token[None, :] * rows + row[:, None]
    complete = PARTS == 1
    if PARTS > 1:
        tl.store(partial + part * tokens * rows + output, sums, mask=inside)
        tl.debug_barrier()  # all of the program's sums are there before it says so
        complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if complete:
        if PARTS > 1:
            HELD: tl.constexpr = PARTS * ACROSS * ROWS * TOKENS <= 128 * 32 * WARPS
            sums = _all_parts(partial + output, tokens * rows, inside, PARTS, HELD)
            tl.store(arrived + tile, 0)
        if BIASED:
            sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        tl.store(out + output, sums.to(out.dtype.element_ty), mask=inside)


class Settings(NamedTuple):
    """How a product is cut up; `possible` lowers what a matrix or the registers have no room for."""

    rows_at_once: int
    """Rows of a program; a power of two from 16 on."""
    parts: int
    """That the inputs are cut into, each for a program."""
    stages: int
    """Groups of its rows that a warp asks memory for at once."""
    warps: int = 4
    """Of a program; a power of two. Those beyond one for each `ROWS_OF_WARP` rows share the rows' groups."""


ROWS_OF_WARP = 32  # at most
REGISTERS = 192  # of a thread, to hold what is asked for at once and the sums; beyond, values would be moved to memory


def usual_settings(rows: int, groups: int, bits: int, tokens: int) -> Settings:
    """Settings of `product` for weights [rows, groups * 64] of `bits` bits and a number of tokens.
    Found on an H100 (gpu/lowbit.jsonl.xz/products_h100.json). For 4 bits, where an NVIDIA H200 had others that were 5 %
    faster, those (gpu/tune_kernels_h200.json: rows of 24 to 224 groups, 1,536 to 151,936 of them); sizes in between
    follow the nearer one. Small matrices need many programs that each ask for much at once; in large ones a program
    takes more rows, because each program reads all tokens."""
    if bits == 4 and rows >= LARGE:
        return _of_large(rows, groups, tokens)
    if bits == 4 and rows < 8192:
        return _of_small(rows, groups, tokens)
    if rows < 8192:
        return Settings(16, 1, 4) if groups <= 64 else Settings(16, 4, 2)
    if tokens <= 16:
        return Settings(32, 1, 3)
    return Settings(128 if rows >= 2**15 else 32, 1, 2)


LARGE, VOCABULARY = 2**14, 2**16  # rows from which a matrix is as gate and up together, and as an lm_head
SHORT = 32  # groups of a row


def _of_large(rows: int, groups: int, tokens: int) -> Settings:
    short = groups <= SHORT
    if rows >= VOCABULARY:
        if tokens > 16:
            return Settings(128, 1, 2 if short else 4)
        return Settings(128 if short and tokens > 8 else 64, 1, 4)
    if tokens > 16:
        return Settings(128, 2, 2) if short else Settings(128, 1, 4)
    if short:
        return Settings(64, 1, 4) if tokens > 8 else Settings(32, 1, 3)
    return Settings(32, 1, 1 if tokens > 8 else 2)


def _of_small(rows: int, groups: int, tokens: int) -> Settings:
    if groups <= 64:  # as q, k and v, or the product after attention
        return Settings(128, 4, 4) if rows > 4096 and groups > SHORT and tokens > 16 else Settings(16, 1, 4)
    if rows <= 2048:  # as down of a small model; two stages at 5 to 8 tokens were within 3 % of the best
        return Settings(16, 4, 4 if tokens <= 4 or 8 < tokens <= 16 else 2)
    if tokens <= 4:
        return Settings(16, 4, 2)
    return Settings(32, 4, 2) if tokens <= 16 else Settings(32, 2, 4)


def possible(wanted: Settings, rows: int, groups: int, bits: int, tokens: int) -> Settings:
    """`wanted` for weights [rows, groups * 64] of `bits` bits, and 2 to 32 tokens, as far as there is room for it."""
    of_warp = min(wanted.rows_at_once, ROWS_OF_WARP)
    warps = max(wanted.warps, wanted.rows_at_once // of_warp)
    parts = min(wanted.parts, groups) if triton.cdiv(rows, wanted.rows_at_once) <= MOST_TILES else 1
    stages = min(
        wanted.stages,
        _steps(groups, parts, warps * of_warp // wanted.rows_at_once),
        _most_stages(of_warp, padded(tokens), bits),
    )
    return Settings(wanted.rows_at_once, parts, stages, warps)


def _steps(groups: int, parts: int, along: int) -> int:
    """Of a warp through its groups of a part, which `along` warps share."""
    return triton.cdiv(triton.cdiv(groups, parts), along)


def _most_stages(of_warp: int, room: int, bits: int) -> int:
    """Groups of rows of a warp, and of tokens, that the registers of each thread hold."""
    of_rows, of_tokens = of_warp // 8, room // 8
    sums = 2 * of_rows * of_tokens
    return max(1, (REGISTERS - sums) // (of_rows * (bits // 2 + 1) + of_tokens * 6))


def product(
    rounded: Tensor,
    factors: Tensor,
    tokens: int,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    asm: bool = True,
    only_compile: bool = False,
    **settings: int,
) -> Tensor:
    """2 to 32 tokens of `in` inputs times a copy [out, in], plus bias [out] -> [tokens, out] in dtype.
    rounded, factors: the tokens as `rounding.round_tokens` gives them. words, scales: int32 [out, in / 4] or [out, in /
    8], and float16 [out, in / 64], of a copy of 8 or 4 bits (`draft_weights.integers`). Sums are in float32, and come
    out the same every time. asm: False where there is no PTX (Triton's interpreter). only_compile: launch nothing.
    settings: of `Settings`, where they are not `usual_settings`. Raises ValueError for other numbers of tokens, and for
    copies of other bits. Where it captures a CUDA graph, call `none_arrived` first."""
    rows, groups = scales.shape
    bits = words.shape[1] // 2 // groups
    if bits not in (4, 8) or words.shape[1] != bits * 2 * groups:
        raise ValueError(f"no copy of 4 or 8 bits in groups of {GROUP.value}: words {list(words.shape)} of {groups}")
    if tokens == 1:
        raise ValueError("1 token: that is a product of one_token.py")
    device, room = words.device, padded(tokens)
    wanted = usual_settings(rows, groups, bits, tokens)._replace(**settings)
    rows_at_once, parts, stages, warps = possible(wanted, rows, groups, bits, tokens)
    of_warp = min(rows_at_once, ROWS_OF_WARP)
    across, arrived, early = rows_at_once // of_warp, none_arrived(device), launches_early(device)
    out = torch.empty(tokens, rows, dtype=dtype, device=device)
    partial = out if parts == 1 else torch.empty(parts, tokens, rows, dtype=torch.float32, device=device)
    grid = (triton.cdiv(rows, rows_at_once), parts)
    launcher(_some_rows, grid, only_compile)(
        rounded.view(torch.int8),
        factors,
        words.view(torch.int8),
        scales,
        out if bias is None else bias,
        out,
        partial,
        arrived,
        tokens,
        groups,
        rows,
        BITS=bits,
        BIASED=bias is not None,
        WHOLE=rows % rows_at_once == 0,
        ROWS=of_warp,
        TOKENS=room,
        WARPS=warps,
        ACROSS=across,
        AT_ONCE=stages,
        LOOPS=stages < _steps(groups, parts, warps // across),
        PARTS=parts,
        ASM=asm,
        EARLY=early,
        num_warps=warps,
        num_stages=1,
        launch_pdl=early,
    )
    return out
