"""Weights as integers of 4 to 8 bits in groups along a row, one scale a group. Needs torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 8


def quantise(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """A weight [out, in] rounded to the nearest integers, packed as the kernels read them.

    Symmetric: an integer q from -2^(bits-1) to 2^(bits-1) - 1 stands for q * scale. Of a few scales for each group, the
    one of least squared error is taken.
    """
    import torch

    rows, columns = weight.shape
    chunk = max(1, 2**25 // columns)
    parts = [_rounded(weight[start : start + chunk], bits, group) for start in range(0, rows, chunk)]
    names = parts[0].keys()
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _rounded(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    import torch

    grouped = weight.float().unflatten(1, (-1, group))  # [rows, groups, group]
    top = 2 ** (bits - 1)
    signed = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    candidates = [signed / -top] + [grouped.abs().amax(2, keepdim=True) / (top - 1) * f for f in (1.0, 0.95, 0.9, 0.85)]
    best_error, best_scale = None, None
    for scale in candidates[: None if bits <= 6 else 2]:
        scale = torch.where(scale == 0, 1.0, scale).to(torch.float16).float()
        q = (grouped / scale).round_().clamp_(-top, top - 1)
        error = (q * scale - grouped).square_().sum(2, keepdim=True)
        if best_error is None:
            best_error, best_scale = error, scale
        else:
            better = error < best_error
            best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    q = (grouped / best_scale).round_().clamp_(-top, top - 1).to(torch.int32)
    return {**pack(q, bits), "scales": best_scale.squeeze(2).to(torch.float16).contiguous()}


def pack(q: Tensor, bits: int) -> dict[str, Tensor]:
    """Integers [rows, groups, group] -> words (and what is beyond 4 bits)."""
    import torch

    parts = q.unflatten(2, (PARTS, -1))  # [rows, groups, part, word]
    shifts = torch.arange(0, 32, 8, device=q.device).view(1, 1, 4, 1)
    if bits == 8:
        low, high = ((parts[:, :, part] & 0xFF) << shifts for part in (slice(0, 4), slice(4, 8)))
        words = torch.stack([_as_int32(half.to(torch.int64).sum(2)) for half in (low, high)], dim=2)
        return {"words": words.flatten(1).contiguous()}
    unsigned = parts + 2 ** (bits - 1)
    nibbles = ((unsigned[:, :, :4] & 15) | ((unsigned[:, :, 4:] & 15) << 4)) << shifts
    packed = {"words": _as_int32(nibbles.to(torch.int64).sum(2)).flatten(1).contiguous()}
    if bits > 4:
        wide = bits - 4
        fields = (unsigned >> 4) << (torch.arange(PARTS, device=q.device) * wide).view(1, 1, PARTS, 1)
        top = fields.sum(2).flatten(1)
        packed["more"] = (top.to(torch.uint8) if bits == 5 else _as_int16(top)).contiguous()
    return packed


def dequantise(tensors: dict[str, Tensor], bits: int, group: int) -> Tensor:
    """The weight [out, in] that a copy stands for, float32."""
    import torch

    words, scales = tensors["words"], tensors["scales"].float()
    width = group // PARTS
    if bits == 8:
        pairs = words.unflatten(1, (-1, 2, width))
        parts = [((pairs[:, :, n // 4] >> (8 * (n % 4))) & 0xFF).to(torch.int8).to(torch.int32) for n in range(PARTS)]
    else:
        each = words.unflatten(1, (-1, width))
        parts = [(each >> (8 * (part % 4) + 4 * (part // 4))) & 15 for part in range(8)]
        if bits > 4:
            top = tensors["more"].to(torch.int32).unflatten(1, (-1, width))
            wide = bits - 4
            parts = [p | (((top >> (wide * n)) & (2**wide - 1)) << 4) for n, p in enumerate(parts)]
        parts = [p - 2 ** (bits - 1) for p in parts]
    q = torch.stack(parts, dim=2).flatten(2)  # [rows, groups, group]
    return (q.float() * scales.unsqueeze(2)).flatten(1)


def _as_int32(x: Tensor) -> Tensor:
    import torch

    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _as_int16(x: Tensor) -> Tensor:
    import torch

    return torch.where(x >= 2**15, x - 2**16, x).to(torch.int16)
