"""What the kernels for one token share: those in 8-bit integers (lowbit.py), and attention."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """Zeros by which programs that share a tile of a result count who has arrived, one for each of `MOST_TILES`.

    Each kernel leaves them as it finds them, and has waited for the one before it. Call it once before a CUDA graph is
    captured.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
