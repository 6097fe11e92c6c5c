"""Weights times one token: plain ones and 8-bit floats (`gemv`), and integer copies of 4 or 8 bits (`product`).

At one token nothing but reading the weight should take time. A program sums a few whole rows, so no program waits for
another, and the tiles keep enough bytes under way. Those of `gemv` were found on an H200 (results/LOG.md), which reads
bf16 weights at 3.2 to 4.2 TB/s with them and at 2.6 to 4.2 with cuBLAS.

Integers have fewer bytes to hide the arithmetic behind. So the token is rounded to 8-bit integers before (rounding.py),
and `dp4a` multiplies and adds four pairs of bytes at once: a word of eight 4-bit weights takes two of them, two masks
and a shift. Each program, which is one warp, loads 16 bytes at a time, and the token's bytes once for all of its rows.
From compute capability 9.0 on it is launched with the kernel that rounds (programmatic dependent launch) and asks for
its first weights before it waits for the token."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP as GROUP_OF_COPIES
from selfspec_cli.vllm_plugin.weights.rounding import dp4a, launcher, launches_early

# Bytes of a weight -> rows and columns of a program's tile, warps, stages of the pipeline.
TILES = {1: (4, 512, 2, 3), 2: (1, 1024, 4, 1)}


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    bias,
    out,
    rows_of_weight,
    columns_of_weight,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    tile = weight + rows[:, None].to(tl.int64) * columns_of_weight + columns[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, columns_of_weight, COLUMNS, num_stages=STAGES):
        if WHOLE:
            part = tl.load(tile + start, eviction_policy="evict_first")  # read once a step
            values = tl.load(x + start + columns)
        else:
            here = start + columns < columns_of_weight
            inside = (rows < rows_of_weight)[:, None] & here[None, :]
            part = tl.load(tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
            values = tl.load(x + start + columns, mask=here, other=0.0)
        sums += part.to(tl.float32) * values.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    exists = rows < rows_of_weight
    if SCALED:
        total *= tl.load(scale + rows, mask=exists, other=0.0)
    if BIASED:
        total += tl.load(bias + rows, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=exists)


def gemv(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """weight [out, in] times the one token in x [..., in], summed in float32 -> [..., out], in x's dtype.
    weight and x are contiguous. scale: float32, one a row of an 8-bit weight; bias: [out]."""
    rows, columns = weight.shape
    tile_rows, tile_columns, warps, stages = TILES[weight.element_size()]
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(rows, tile_rows),)](
        x,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        out,
        rows,
        columns,
        SCALED=scale is not None,
        BIASED=bias is not None,
        WHOLE=rows % tile_rows == 0 and columns % tile_columns == 0,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        STAGES=stages,
        num_warps=warps,
    )
    return out


GROUP = tl.constexpr(GROUP_OF_COPIES)  # weights that share a scale
WIDTH = tl.constexpr(GROUP_OF_COPIES // 8)  # words of a group, each with one weight of each part


@triton.jit
def _token(rounded, factors, group, here):
    """What rounding.py wrote of some groups: words int32 [GROUPS, WIDTH] twice, and factors [GROUPS]."""
    place = rounded + group[:, None] * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    low = tl.load(place, mask=here[:, None], other=0)
    high = tl.load(place + WIDTH, mask=here[:, None], other=0)
    return low, high, tl.load(factors + group, mask=here, other=0.0)


@triton.jit
def _once(place, here):
    """What lies at `place`, which is read once a step; 0 where `here` is false."""
    return tl.load(place, mask=here, other=0, eviction_policy="evict_first")


@triton.jit
def _weights(words, scales, row, group, here, TOTAL: tl.constexpr, BITS: tl.constexpr):
    """Bytes of parts 0 to 3 and of parts 4 to 7 of each word of some groups of a row, as unsigned integers (signed ones
    for 8 bits), int32 [GROUPS, WIDTH] twice, and their scales [GROUPS]. TOTAL: groups of a row."""
    word, inside = tl.arange(0, WIDTH)[None, :], here[:, None]
    start = row.to(tl.int64) * TOTAL
    if BITS == 8:
        pair = words + start * (2 * WIDTH) + group[:, None] * (2 * WIDTH) + word
        low, high = _once(pair, inside), _once(pair + WIDTH, inside)
    else:
        at = group[:, None] * WIDTH + word
        both = _once(words + start * WIDTH + at, inside)
        low, high = both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F
    return low, high, _once(scales + start + group, here)


@triton.jit
def _of_rows(words, scales, first, rows, group, TOTAL: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """`_weights` of ROWS rows, as a tuple; what would be beyond the last row is the last row again."""
    found = ()
    for n in tl.static_range(ROWS):
        row = tl.minimum(first + n, rows - 1)
        found += (_weights(words, scales, row, group, group < TOTAL, TOTAL, BITS),)  # type: ignore[assignment]
    return found


@triton.jit
def _times_token(
    weights, rounded, factors, group, TOTAL: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Groups of each row times those of the token: a tuple of ROWS float32 [GROUPS]."""
    low, high, factor = _token(rounded, factors, group, group < TOTAL)
    less = tl.zeros_like(low)
    if BITS < 8:
        ones = less + 0x01010101
        less = -(2 ** (BITS - 1)) * dp4a(ones, high, dp4a(ones, low, less, ASM), ASM)
    found = ()
    for n in tl.static_range(ROWS):
        products = tl.sum(dp4a(weights[n][1], high, dp4a(weights[n][0], low, less, ASM), ASM), axis=1)
        scaled = products.to(tl.float32) * (weights[n][2].to(tl.float32) * factor)
        found += (scaled,)  # type: ignore[assignment]
    return found


@triton.jit
def _rows(
    rounded,
    factors,
    words,
    scales,
    bias,
    out,
    rows,
    TOTAL: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    REST: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program, which is one warp, multiplies a token by ROWS rows of TOTAL groups, GROUPS at a time. REST: a power of
    two that is enough for what remains of a row. EARLY: launched with the kernel in front, whose token it waits for."""
    FULL: tl.constexpr = TOTAL // GROUPS
    first = tl.program_id(0) * ROWS
    group, last = tl.arange(0, GROUPS), FULL * GROUPS + tl.arange(0, REST)
    if FULL > 0:
        weights = _of_rows(words, scales, first, rows, group, TOTAL, BITS, ROWS)
    if FULL * GROUPS < TOTAL:
        rest = _of_rows(words, scales, first, rows, last, TOTAL, BITS, ROWS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before all kernels in front have ended: what comes next may read what they wrote without waiting.
        tl.extra.cuda.gdc_launch_dependents()
    if FULL > 0:
        sums = _times_token(weights, rounded, factors, group, TOTAL, BITS, ROWS, ASM)
        for step in tl.static_range(1, FULL):
            group = step * GROUPS + tl.arange(0, GROUPS)
            weights = _of_rows(words, scales, first, rows, group, TOTAL, BITS, ROWS)
            sums = _added(sums, _times_token(weights, rounded, factors, group, TOTAL, BITS, ROWS, ASM), ROWS)
    if FULL * GROUPS < TOTAL:
        others = _times_token(rest, rounded, factors, last, TOTAL, BITS, ROWS, ASM)
    for n in tl.static_range(ROWS):
        if FULL > 0:
            total = tl.sum(sums[n], axis=0)
        if FULL == 0:
            total = tl.sum(others[n], axis=0)
        elif FULL * GROUPS < TOTAL:
            total += tl.sum(others[n], axis=0)
        if first + n < rows:
            if BIASED:
                total += tl.load(bias + first + n).to(tl.float32)
            tl.store(out + first + n, total.to(out.dtype.element_ty))


@triton.jit
def _added(some, others, ROWS: tl.constexpr):
    """Two tuples, added one by one."""
    found = ()
    for n in tl.static_range(ROWS):
        found += (some[n] + others[n],)  # type: ignore[assignment]
    return found


def usual_settings(rows: int, groups: int, bits: int) -> tuple[int, int]:
    """Rows of a program, and groups of a step of it, for a copy [rows, groups * 64]. Four rows share a token's bytes,
    and 32 groups are all of a row of 2,048. One row where four were slower on an H100, because they left too few
    programs to keep the memory busy (gpu/lowbit.jsonl.xz/products_h100.json). For 4 bits those that were 5 % faster on
    an H200 (gpu/tune_kernels_h200.json): large matrices of short rows, and few long rows."""
    if bits == 8:
        return (4 if rows >= 4096 else 1), 32
    if groups < 32 and rows >= 2**14:
        return 8, 16
    if groups < 96:
        return 4, 32
    return (2, 64) if rows <= 2048 else (1, 32)


def width_of(words: Tensor, columns: int) -> int:
    """Bits of a copy's integers, by its words; columns: of the weight."""
    return 8 if words.shape[1] * 4 == columns else 4


def product(
    rounded: Tensor,
    factors: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows_at_once: int | None = None,
    at_once: int | None = None,
    asm: bool = True,
    only_compile: bool = False,
) -> Tensor:
    """One token of `in` inputs times a copy [out, in], plus bias [out] -> [1, out] in dtype. rounded, factors: the
    token as `rounding.round_tokens` gives it. rows_at_once: rows of a program; at_once: groups of a step of it; None:
    as usual. asm: False where there is no PTX (Triton's interpreter). only_compile: launch nothing."""
    early = launches_early(words.device)
    rows, groups = scales.shape
    bits = width_of(words, groups * GROUP_OF_COPIES)
    usual = usual_settings(rows, groups, bits)
    rows_at_once, at_once = rows_at_once or usual[0], at_once or usual[1]
    out = torch.empty(1, rows, dtype=dtype, device=words.device)
    grid = (triton.cdiv(rows, rows_at_once),)
    launcher(_rows, grid, only_compile)(
        rounded,
        factors,
        words,
        scales,
        out if bias is None else bias,
        out,
        rows,
        TOTAL=groups,
        BIASED=bias is not None,
        BITS=bits,
        ROWS=rows_at_once,
        GROUPS=at_once,
        REST=triton.next_power_of_2(max(1, groups % at_once)),
        ASM=asm,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return out
