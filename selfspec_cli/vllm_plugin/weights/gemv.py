"""A weight times one token, at the rate at which the GPU's memory can be read.

At one token nothing but reading the weight takes time. One program sums a few whole rows, so no program waits for
another; the tiles below keep enough bytes under way. They were found on an H200 (results/LOG.md), which reads bf16
weights at 3.2 to 4.2 TB/s with them and at 2.6 to 4.2 with cuBLAS. The tile for float32 has not been tried out.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of a weight -> rows and columns of a program's tile, warps, stages of the pipeline.
TILES = {1: (4, 512, 2, 3), 2: (1, 1024, 4, 1), 4: (1, 512, 4, 1)}


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

    weight and x are contiguous. scale: float32, one a row of an 8-bit weight; bias: [out].
    """
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
