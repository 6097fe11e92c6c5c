"""A candidate for lowbit.py's product of one token: several rows a program, and no kernel that rounds the token.

It has been run in Triton's interpreter only. What it is meant to gain over lowbit.py's kernel, where a warp takes one
row: a token's bytes are loaded once for several rows (by the PTX, six loads of the token came with two of weights);
all loads are of 16 bytes, those of 8-bit copies too; the sum that 4 to 6 bits need is computed instead of loaded; and
a program has all of a short row's weights on their way before it waits for the token. It reads lowbit.py's layout.
tune_kernels.py times it as `rows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.vllm_plugin.weights.lowbit import width_of
from selfspec_cli.vllm_plugin.weights.one_token import dp4a, four_bytes, launches_early

PARTS = tl.constexpr(8)  # of a group
GROUP = tl.constexpr(64)  # weights that share a scale
WIDTH = tl.constexpr(8)  # words of a group, of one weight of each part


@triton.jit
def _as_bytes(x, group, here):
    """Groups of a token as bytes, int32 [GROUPS, WIDTH] twice: the words of parts 0 to 3, and those of parts 4 to 7;
    and the factor by which each group was divided, float32 [GROUPS]. here: [GROUPS], which of them there are."""
    values = x + group[:, None] * GROUP + tl.arange(0, WIDTH)[None, :]
    valid = here[:, None]
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
    return four_bytes(x0, x1, x2, x3, inverse), four_bytes(x4, x5, x6, x7, inverse), largest * (1.0 / 127.0)


@triton.jit
def _round_token(x, rounded, factors, groups_of_row, GROUPS: tl.constexpr, EARLY: tl.constexpr):
    """A token as `_as_bytes` gives it: of each group the words of parts 0 to 3, then those of parts 4 to 7; and the
    factors."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # `_rows` waits for this kernel's end itself
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    here = group < groups_of_row
    low, high, factor = _as_bytes(x, group, here)
    place = rounded + group[:, None] * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    tl.store(place, low, mask=here[:, None])
    tl.store(place + WIDTH, high, mask=here[:, None])
    tl.store(factors + group, factor, mask=here)


@triton.jit
def _token(x, rounded, factors, group, here, ITSELF: tl.constexpr):
    """`_as_bytes`, computed here or read where `_round_token` wrote it."""
    if ITSELF:
        low, high, factor = _as_bytes(x, group, here)
    else:
        place = rounded + group[:, None] * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]
        low = tl.load(place, mask=here[:, None], other=0)
        high = tl.load(place + WIDTH, mask=here[:, None], other=0)
        factor = tl.load(factors + group, mask=here, other=0.0)
    return low, high, factor


@triton.jit
def _once(place, here):
    """What lies at `place`, which is read once a step; 0 where `here` is false."""
    return tl.load(place, mask=here, other=0, eviction_policy="evict_first")


@triton.jit
def _weights(words, more, scales, row, group, here, TOTAL: tl.constexpr, BITS: tl.constexpr):
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
        if BITS == 5:  # four bits spread to four bytes
            top = _once(more + start * WIDTH + at, inside).to(tl.int32)
            low |= (((top & 0xF) * 0x00204081) & 0x01010101) << 4
            high |= ((((top >> 4) & 0xF) * 0x00204081) & 0x01010101) << 4
        if BITS == 6:  # four pairs of bits spread to four bytes
            top = _once(more + start * WIDTH + at, inside).to(tl.int32) & 0xFFFF
            first, second = top & 0xFF, top >> 8
            low |= ((first | (first << 6) | (first << 12) | (first << 18)) & 0x03030303) << 4
            high |= ((second | (second << 6) | (second << 12) | (second << 18)) & 0x03030303) << 4
    return low, high, _once(scales + start + group, here)


@triton.jit
def _of_rows(words, more, scales, first, rows, group, TOTAL: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """`_weights` of ROWS rows, as a tuple; what would be beyond the last row is the last row again."""
    found = ()
    for n in tl.static_range(ROWS):
        row = tl.minimum(first + n, rows - 1)
        found += (_weights(words, more, scales, row, group, group < TOTAL, TOTAL, BITS),)  # type: ignore[assignment]
    return found


@triton.jit
def _times_token(
    weights,
    x,
    rounded,
    factors,
    group,
    TOTAL: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    ITSELF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Groups of each row times those of the token: a tuple of ROWS float32 [GROUPS]."""
    low, high, factor = _token(x, rounded, factors, group, group < TOTAL, ITSELF)
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
    x,
    rounded,
    factors,
    words,
    more,
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
    ITSELF: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program, which is one warp, multiplies a token by ROWS rows of TOTAL groups, GROUPS at a time.

    REST: a power of two that is enough for what remains of a row. ITSELF: each program rounds the token; else
    `_round_token` has. EARLY: the program is launched before the kernel in front has ended, and reads its first weights
    before it waits for the token.
    """
    FULL: tl.constexpr = TOTAL // GROUPS
    first = tl.program_id(0) * ROWS
    group, last = tl.arange(0, GROUPS), FULL * GROUPS + tl.arange(0, REST)
    if FULL > 0:
        weights = _of_rows(words, more, scales, first, rows, group, TOTAL, BITS, ROWS)
    if FULL * GROUPS < TOTAL:
        rest = _of_rows(words, more, scales, first, rows, last, TOTAL, BITS, ROWS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before all kernels in front have ended: what comes next may read what they wrote without waiting.
        tl.extra.cuda.gdc_launch_dependents()
    if FULL > 0:
        sums = _times_token(weights, x, rounded, factors, group, TOTAL, BITS, ROWS, ITSELF, ASM)
        for step in tl.static_range(1, FULL):
            group = step * GROUPS + tl.arange(0, GROUPS)
            weights = _of_rows(words, more, scales, first, rows, group, TOTAL, BITS, ROWS)
            sums = _added(sums, _times_token(weights, x, rounded, factors, group, TOTAL, BITS, ROWS, ITSELF, ASM), ROWS)
    if FULL * GROUPS < TOTAL:
        others = _times_token(rest, x, rounded, factors, last, TOTAL, BITS, ROWS, ITSELF, ASM)
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


ROUNDED_AT_ONCE = 8  # groups of a program


def product(
    x: Tensor,
    words: Tensor,
    more: Tensor | None,
    scales: Tensor,
    bias: Tensor | None = None,
    rows_at_once: int = 4,
    at_once: int = 32,
    itself: bool = False,
    asm: bool = True,
    early: bool | None = None,
) -> Tensor:
    """One token in x [1, in] times a copy [out, in], plus bias [out] -> [1, out] in x's dtype.

    x is contiguous. rows_at_once: rows of a program; at_once: groups of a step of it; itself: each program rounds the
    token, and no kernel in front of them. asm: False where there is no PTX (Triton's interpreter). early: launch the
    product before the kernel in front has ended; None: where the device can.
    """
    early = launches_early(x.device) if early is None else early
    rows, groups = scales.shape
    bits = width_of(words, more, x.shape[1])
    rounded, factors = x, x  # not looked at where each program rounds the token
    if not itself:
        rounded = torch.empty(groups * 2 * WIDTH.value, dtype=torch.int32, device=x.device)
        factors = torch.empty(groups, dtype=torch.float32, device=x.device)
        _round_token[(triton.cdiv(groups, ROUNDED_AT_ONCE),)](
            x, rounded, factors, groups, GROUPS=ROUNDED_AT_ONCE, EARLY=early, num_warps=2, launch_pdl=early
        )
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _rows[(triton.cdiv(rows, rows_at_once),)](
        x,
        rounded,
        factors,
        words,
        words if more is None else more,
        scales,
        x if bias is None else bias,
        out,
        rows,
        TOTAL=groups,
        BIASED=bias is not None,
        BITS=bits,
        ROWS=rows_at_once,
        GROUPS=at_once,
        REST=triton.next_power_of_2(max(1, groups % at_once)),
        ITSELF=itself,
        ASM=asm,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return out
