"""Products with copies of 4 and 8 bits by Marlin, vLLM's kernels for integer weights, for 33 to 64 tokens. CUDA only.

Which engines keep this layout, and which steps read it: lowbit.py.
"""

from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers

MOST = 64  # tokens; with more, products are bound by arithmetic, and the target's own weight is as fast
ROWS = 8192  # unpacked at once, so that the integers of an lm_head take little memory compared with it


def serves(bits: int, rows: int, columns: int) -> bool:
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


def product(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
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
