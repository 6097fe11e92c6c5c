"""Tokens as signed bytes, as the products with integer copies read them (one_token.py, few_tokens.py).

Each group of 64 inputs is divided by its own largest magnitude. A kernel that does only that takes about 1.2 us, four
times a layer. So the norm and the gated activation, which most often come before a product, can round their own results
(lowbit.py puts them there). From compute capability 9.0 on the product is launched together with any of them
(programmatic dependent launch). All kernels for one token, attention among them, share what comes first here."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP as GROUP_OF_COPIES

GROUP = tl.constexpr(GROUP_OF_COPIES)  # inputs that share a factor
WIDTH = tl.constexpr(GROUP_OF_COPIES // 8)  # inputs of a part
WORDS = GROUP_OF_COPIES // 4  # of a group of a token
AT_ONCE = 8  # groups of a program
MOST = 32  # tokens that are rounded at a time


MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits of a float


@triton.jit
def dp4a(a, b, c, ASM: tl.constexpr):
    """c plus the products of four signed bytes, in int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return c


@triton.jit
def four_bytes(a, b, c, d, inverse):
    """Four values times `inverse`, rounded to signed bytes, in one word."""
    first = (a * inverse + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    second = (b * inverse + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    third = (c * inverse + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    fourth = (d * inverse + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    return first | (second << 8) | (third << 16) | (fourth << 24)


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one it depends on has ended: NVIDIA's devices from Hopper on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launcher(kernel: Any, grid: tuple[int, ...], only_compile: bool) -> Callable[..., object]:
    """What launches a kernel of Triton's with its arguments, or only compiles it for them."""
    return partial(kernel.warmup, grid=grid) if only_compile else kernel[grid]


MOST_TILES = 2**14  # of a result that several programs share


@lru_cache
def none_arrived(device: torch.device) -> Tensor:
    """Zeros by which programs that share a tile of a result count who has arrived, one for each of `MOST_TILES`; each
    kernel leaves them at zero, and has waited for the one before it. Call it once before a CUDA graph is captured."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit
def _wait_for_what_is_in_front(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # a product waits for this kernel's end itself
        tl.extra.cuda.gdc_wait()


@triton.jit
def _parts(start, group, here):
    """The eight parts of some groups of what begins at `start`: float32 [GROUPS, 8] each, 0 where `here` is false."""
    place, valid = start + group[:, None] * GROUP + tl.arange(0, WIDTH)[None, :], here[:, None]
    found = ()
    for part in tl.static_range(8):
        found += (tl.load(place + part * WIDTH, mask=valid, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def _store_parts(parts, start, group, here):
    """What `_parts` loads, in the type of `start`."""
    place, valid = start + group[:, None] * GROUP + tl.arange(0, WIDTH)[None, :], here[:, None]
    for part in tl.static_range(8):
        tl.store(place + part * WIDTH, parts[part].to(start.dtype.element_ty), mask=valid)


@triton.jit
def _store_rounded(parts, rounded, factors, group, token, here, TOKENS: tl.constexpr, HALVES: tl.constexpr):
    """Bytes [groups, TOKENS, 64] and the factors [groups, TOKENS] by which they were divided. Of 64 bytes the words of
    parts 0 to 3 come first, then those of parts 4 to 7. HALVES: for integers of 4 bits that tensor cores multiply as 16
    times themselves; each quarter of the bytes is what one lane multiplies, two words of each."""
    most = tl.abs(parts[0])
    for part in tl.static_range(1, 8):
        most = tl.maximum(most, tl.abs(parts[part]))
    largest = tl.max(most, axis=1)  # [GROUPS]
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)[:, None]
    at, word = group * TOKENS + token, tl.arange(0, WIDTH)[None, :]
    place = rounded + at[:, None] * (2 * WIDTH) + (word // 2 * 4 + word % 2 if HALVES else word)
    tl.store(place, four_bytes(parts[0], parts[1], parts[2], parts[3], inverse), mask=here[:, None])
    more = four_bytes(parts[4], parts[5], parts[6], parts[7], inverse)
    tl.store(place + (2 if HALVES else WIDTH), more, mask=here[:, None])
    tl.store(factors + at, largest * (1.0 / 2032.0 if HALVES else 1.0 / 127.0), mask=here)


@triton.jit
def _round(
    x, rounded, factors, groups, TOKENS: tl.constexpr, HALVES: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr
):
    """Some groups of a token."""
    _wait_for_what_is_in_front(EARLY)
    token, group = tl.program_id(1), tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    here = group < groups
    values = _parts(x + token * groups * GROUP, group, here)
    _store_rounded(values, rounded, factors, group, token, here, TOKENS, HALVES)


@triton.jit
def _add_and_norm(
    x,
    residual,
    weight,
    normed,
    left,
    rounded,
    factors,
    groups,
    epsilon,
    TOKENS: tl.constexpr,
    HALVES: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """All groups of a token. TOKENS: 0 where nothing is to be rounded."""
    token, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    here, start = group < groups, token * groups * GROUP
    scales = _parts(weight, group, here)  # no kernel in front has written them
    _wait_for_what_is_in_front(EARLY)
    some, others = _parts(x + start, group, here), _parts(residual + start, group, here)
    sums = ()
    squares = tl.zeros([GROUPS, WIDTH], tl.float32)
    for part in tl.static_range(8):
        total = some[part] + others[part]
        sums += (total,)  # type: ignore[assignment]
        squares += total * total
    _store_parts(sums, left + start, group, here)
    factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (groups * GROUP) + epsilon)
    values = ()
    for part in tl.static_range(8):
        value = (sums[part] * factor).to(weight.dtype.element_ty).to(tl.float32) * scales[part]
        values += (value.to(normed.dtype.element_ty).to(tl.float32),)  # type: ignore[assignment]
    _store_parts(values, normed + start, group, here)
    if TOKENS > 0:
        _store_rounded(values, rounded, factors, group, token, here, TOKENS, HALVES)


@triton.jit
def _activate(
    x,
    activated,
    rounded,
    factors,
    groups,
    TOKENS: tl.constexpr,
    HALVES: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some groups of a token. TOKENS: 0 where nothing is to be rounded."""
    _wait_for_what_is_in_front(EARLY)
    token, group = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    here, columns = group < groups, groups * GROUP
    gates = _parts(x + token * 2 * columns, group, here)
    others = _parts(x + token * 2 * columns + columns, group, here)
    values = ()
    for part in tl.static_range(8):
        value = gates[part] / (1.0 + tl.exp(-gates[part])) * others[part]
        values += (value.to(activated.dtype.element_ty).to(tl.float32),)  # type: ignore[assignment]
    _store_parts(values, activated + token * columns, group, here)
    if TOKENS > 0:
        _store_rounded(values, rounded, factors, group, token, here, TOKENS, HALVES)


def padded(tokens: int) -> int:
    """How many tokens, of 1 to 32, there is room for between one group and the next."""
    if not 1 <= tokens <= MOST:
        raise ValueError(f"{tokens} tokens, not 1 to {MOST}")
    return next(room for room in (1, 8, 16, MOST) if tokens <= room)


def room_for(groups: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for rounded tokens and their factors: int32 [tokens * groups * 16] and float32 [tokens * groups]."""
    words = torch.empty(tokens * groups * WORDS, dtype=torch.int32, device=device)
    return words, torch.empty(tokens * groups, dtype=torch.float32, device=device)


def _options(tokens: int, bits: int, device: torch.device) -> dict[str, Any]:
    """What all of these kernels are launched with. bits: 0 to round nothing."""
    early, rounds = launches_early(device), bits > 0 and tokens <= MOST
    halves = bits == 4 and tokens > 1
    return {"TOKENS": padded(tokens) if rounds else 0, "HALVES": halves, "EARLY": early, "launch_pdl": early}


def round_tokens(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [n, in], contiguous, as bytes and their factors, for a product with a copy of `bits` bits; n is 1 to 32."""
    tokens, groups = x.shape[0], x.shape[1] // GROUP_OF_COPIES
    rounded, factors = room_for(groups, padded(tokens), x.device)
    _round[(triton.cdiv(groups, AT_ONCE), tokens)](
        x, rounded, factors, groups, GROUPS=AT_ONCE, num_warps=2, **_options(tokens, bits, x.device)
    )
    return rounded, factors


def add_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The root-mean-square norm of x + residual, both [n, in], as vLLM's `fused_add_rms_norm` rounds it, the sum
    itself, and the norm as `round_tokens` gives it, written for up to 32 tokens. weight: [in]."""
    tokens, groups = x.shape[0], x.shape[1] // GROUP_OF_COPIES
    normed, left = torch.empty_like(x), torch.empty_like(x)
    rounded, factors = room_for(groups, MOST, x.device)
    if tokens:
        _add_and_norm[(tokens,)](
            x,
            residual,
            weight,
            normed,
            left,
            rounded,
            factors,
            groups,
            epsilon,
            GROUPS=triton.next_power_of_2(groups),
            num_warps=8 if groups > 32 else 4,
            **_options(tokens, bits, x.device),
        )
    return normed, left, rounded, factors


def activate(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """silu(x[:, :in]) * x[:, in:] of x [n, 2 * in], and that as `round_tokens` gives it, written for up to 32 tokens.
    bits: 0 to round nothing."""
    tokens, groups = x.shape[0], x.shape[1] // 2 // GROUP_OF_COPIES
    activated = x.new_empty(tokens, x.shape[1] // 2)
    rounded, factors = room_for(groups, MOST, x.device)
    if tokens:
        _activate[(triton.cdiv(groups, AT_ONCE), tokens)](
            x, activated, rounded, factors, groups, GROUPS=AT_ONCE, num_warps=2, **_options(tokens, bits, x.device)
        )
    return activated, rounded, factors
