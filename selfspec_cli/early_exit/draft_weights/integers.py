"""Weights as integers of 4 or 8 bits, in groups along a row with one scale a group.

A word of 32 bits holds one weight of each of the eight equal parts of a group, so that a token's values load as
contiguous parts: byte b of a word has part b in its low four bits and part b + 4 in its high ones. With 8 bits a
group has two runs of words, of parts 0 to 3 and of parts 4 to 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.draft_weights.base import DraftWeights, WeightFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PARTS = 8  # of a group
GROUP = 64  # weights that share a scale
CHUNK = 2**24  # elements quantised at once, so that the float32 values in between stay below a few hundred MiB


class Integers(DraftWeights):
    """A copy is {"words": int32, "scales": float16 [out, in / GROUP]}.
    An integer q from -2^(bits-1) to 2^(bits-1) - 1 is the weight q * scale."""

    experts = True
    kernels = "selfspec_cli.vllm_plugin.weights.lowbit"

    def __init__(self, width: int) -> None:
        self.width = width  # 4 or 8
        self.name = f"int{width}"
        self.help = f"{width}-bit integer copies with one scale for {GROUP} weights, made at load"
        self.bits = width + 16 / GROUP

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Round to nearest; of a few scales for each group the one of least squared error is taken.
        Raises SettingsError for a weight that is not finite, or whose rows do not divide into groups."""
        import torch

        if weight.shape[1] % GROUP:
            raise self.impossible(_no_groups(weight.shape[1]))
        step = max(1, CHUNK // weight.shape[1])
        parts = [self._rows(weight[start : start + step]) for start in range(0, len(weight), step)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def fit(self, weight: Tensor, moment: Tensor) -> dict[str, Tensor]:
        """Round by GPTQ's method; of the same scales the one of least error on the data is taken."""
        from selfspec_cli.early_exit.fitted_weights import rounded_in_order

        if weight.shape[1] % GROUP or not weight.isfinite().all():
            return self.quantise(weight)  # which says what is wrong
        top = 2 ** (self.width - 1)

        def scales(block: Tensor, importance: Tensor) -> Tensor:
            return self._nearest(block.unsqueeze(1), importance)[0].squeeze(1)

        q, scale = rounded_in_order(weight, moment, GROUP, (-top, top - 1), scales)
        return self._copy(q, scale)

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        q = integers(tensors, self.width)  # [out, groups, GROUP]
        return (q.float() * tensors["scales"].float().unsqueeze(2)).flatten(1).to(dtype)

    def reason_against(self, facts: WeightFacts) -> str | None:
        """On CUDA the kernels read tokens in bfloat16; rows must divide into groups."""
        if facts.device == "cuda" and facts.dtype not in (None, "bfloat16"):
            return f"on CUDA the kernel multiplies tokens in bfloat16, not {facts.dtype}"
        odd = next((length for length in facts.row_lengths if length % GROUP), None)
        return super().reason_against(facts) if odd is None else _no_groups(odd)

    def _rows(self, weight: Tensor) -> dict[str, Tensor]:
        grouped = weight.float().unflatten(1, (-1, GROUP))  # [rows, groups, GROUP]
        if not grouped.isfinite().all():
            raise self.not_finite()
        scale, q = self._nearest(grouped)
        return self._copy(q, scale)

    def _copy(self, q: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Integers [rows, groups, GROUP] of any type and scales [rows, groups, 1] -> the copy."""
        import torch

        return {**_packed(q.to(torch.int32), self.width), "scales": scale.squeeze(2).to(torch.float16)}

    def _nearest(self, grouped: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scales [rows, groups, 1] of least squared error among `_scales`, and integers rounded to the nearest.
        importance: [GROUP], how much an error of each column counts; None for all the same."""
        import torch

        top = 2 ** (self.width - 1)
        least = torch.full_like(grouped[:, :, :1], torch.inf)
        scale, q = torch.ones_like(least), torch.zeros_like(grouped)
        for candidate in _scales(grouped, self.width):
            tried = candidate.to(torch.float16).float()
            tried = torch.where(tried == 0, 1.0, tried)  # too small for a half: the group's integers are zeros
            rounded = (grouped / tried).round_().clamp_(-top, top - 1)
            squares = (rounded * tried - grouped).square_()
            error = (squares if importance is None else squares * importance).sum(2, keepdim=True)
            better = error < least
            least, scale = torch.where(better, error, least), torch.where(better, tried, scale)
            q = torch.where(better, rounded, q)
        return scale, q


INT4, INT8 = Integers(4), Integers(8)


def _no_groups(length: int) -> str:
    return f"a weight has rows of {length} values (on each tensor-parallel rank), and a group has {GROUP}"


def _scales(grouped: Tensor, width: int) -> list[Tensor]:
    """Scales to choose from, [rows, groups, 1] each: the largest value at an end of the range, and closer ranges."""
    top = 2 ** (width - 1)
    largest = grouped.abs().amax(2, keepdim=True)
    extreme = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    both_signs = largest / (top - 1)
    return [extreme / -top, *(both_signs * closer for closer in (1.0, 0.95, 0.9, 0.85))]


def _packed(q: Tensor, width: int) -> dict[str, Tensor]:
    """Integers int32 [rows, groups, GROUP] -> words, of which the first byte is the lowest (little-endian)."""
    import torch

    parts = q.unflatten(2, (2, PARTS // 2, -1))  # [rows, groups, half, byte, word]
    if width == 4:
        low, high = (parts + 8).split(1, dim=2)
        parts = low | (high << 4)
    return {"words": parts.to(torch.uint8).transpose(3, 4).contiguous().view(torch.int32).flatten(1)}


def integers(tensors: Mapping[str, Tensor], width: int) -> Tensor:
    """The integers of a copy, int32 [rows, groups, GROUP]: the inverse of `_packed`."""
    import torch

    words = tensors["words"].unflatten(1, (-1, width // 4, GROUP // PARTS, 1))
    parts = words.view(torch.int8).int().transpose(3, 4)  # [rows, groups, half or 1, byte, word]
    if width == 4:
        parts = torch.cat([parts & 15, (parts >> 4) & 15], dim=2) - 8
    return parts.flatten(2)
