"""What leaves blocks of the KV cache out of the block tables that draft steps read.

Keys carry their positions already, so attention needs no more than a shorter list of blocks and the number of tokens in
it. The target's next pass gathers its own block tables again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState


class ContextKernel:
    """Of one kind of context, with its numbers. A module of kernels has a class of this kind as `KERNEL`, made with the
    numbers that a user wrote.

    A kind needs `shortened` and `longest`; both model runners draft by them. `shorten` may be written anew where plain
    PyTorch is too slow on a GPU. A kind that looks at keys finds its layers in
    `vllm_config.compilation_config.static_forward_context`, by their names: `names`, of the layers that draft. `groups`
    are vLLM's attention groups of these layers, of one KV cache."""

    groups: Sequence[vllm.AttentionGroup]
    names: Set[str]
    vllm_config: vllm.VllmConfig

    def start(self) -> None:
        """Called once, when the above is set and before CUDA graphs are captured. Raises SettingsError for a model that
        the kind is not for."""

    def begin(self, ends: Tensor, rejected: Tensor) -> None:
        """Called before a round, after the target's pass. ends [n]: one past each row's last token in that pass.
        rejected [n]: how many of its last tokens are drafts that were rejected."""

    def shortened(
        self, blocks: Tensor, seq_lens: Tensor, block_size: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(block tables, tokens left out) for drafts after contexts of `seq_lens` tokens, the newest one included.
        blocks: int32 [n, columns]; seq_lens: [n] -> block tables of the same shape, and the tokens in the blocks that
        were left out, [n] of the kind of `seq_lens`. Kept are whole blocks, in their order, and with them the block of
        the newest token and every column after it, into which drafts are written. rows [n]: of `begin`; None: all."""
        raise NotImplementedError

    def longest(self, block_size: int) -> int:
        """The greatest number of tokens that are kept of a context, however long it is."""
        raise NotImplementedError

    def shorten(self, state: DraftState, table: Tensor, block_size: int) -> None:
        """The same in place, for a round of the V2 runner.
        table: int32 [rows, columns], contiguous, in the order of the batch; the first rows of `state` are its rows."""
        n = min(len(state.draft_tokens), len(table))
        blocks, left_out = self.shortened(table[:n], state.buffers.seq_lens[:n], block_size)
        table[:n] = blocks
        state.left_out[:n] = left_out
        state.buffers.seq_lens[:n] -= left_out


def blocks_left_out(seq_lens: Tensor, window: int, block_size: int) -> Tensor:
    """Number of KV cache blocks between the first block and those that hold the last `window` tokens of a context.
    seq_lens: [n] -> [n], as integers of the same kind."""
    return ((seq_lens - window) // block_size - 1).clamp_min(0)
