"""Drafts that attend to the first block and to the last tokens of their context: a block table with a gap in it.

Keys carry their positions already, so attention needs no more than a shorter list of blocks and the number of tokens in
it. The target's next pass gathers its own block tables again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState


@triton.jit(do_not_specialize=["window"])
def _shorten(table, columns, seq_lens, left_out, window, BLOCK_SIZE: tl.constexpr, KEPT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.load(seq_lens + row)
    blocks = tl.maximum((tokens - window) // BLOCK_SIZE - 1, 0)  # between the first and those of the window
    place = 1 + tl.arange(0, KEPT)
    here = place + blocks < columns
    moved = tl.load(table + row * columns + place + blocks, mask=here, other=0)
    tl.debug_barrier()  # all are read before the first is overwritten
    tl.store(table + row * columns + place, moved, mask=here)
    tl.store(left_out + row, blocks * BLOCK_SIZE)
    tl.store(seq_lens + row, tokens - blocks * BLOCK_SIZE)


def shorten(state: DraftState, table: Tensor, block_size: int, window: int) -> None:
    """Leave out the blocks between a context's first one and those of its last `window` tokens, for this round.

    table: int32 [rows, blocks], contiguous, in the order of the batch; the first rows of `state` are its rows.
    """
    rows, k = state.draft_tokens.shape
    kept = (window + k) // block_size + 3  # the window may begin and the drafts may end within a block
    _shorten[(min(rows, len(table)),)](
        table,
        table.shape[1],
        state.buffers.seq_lens,
        state.left_out,
        window,
        BLOCK_SIZE=block_size,
        KEPT=triton.next_power_of_2(kept),
    )
