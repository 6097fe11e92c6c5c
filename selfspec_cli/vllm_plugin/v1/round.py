"""The requests of one round of drafting on vLLM's V1 model runner, and where in the KV cache its steps write.

The slots and sequence lengths of every step are known when a round begins. They are computed at once and a step takes
its row, because on one request a step's arithmetic costs what starting its operations costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.contexts.base import ContextKernel
from selfspec_cli.vllm_plugin.vllm_names import CommonAttentionMetadata


@dataclass
class Round:
    """Requests that are still drafting: row of the batch, token to run and its position, one entry a request."""

    rows: Tensor  # int64 [n]
    tokens: Tensor  # int32 [n]
    positions: Tensor  # int64 [n]
    room: int  # steps after which the first request may stand at the end of the model's context
    steps: int = 0  # most that any request takes
    lengths: Tensor | None = None  # int64 [n], most steps of each request; None: all take as many as there are
    limits: Tensor | None = None  # float32 [n], what each gate compares with; None: all with the gate's own
    previous: Tensor | None = None  # float32 [n], the gate's statistic at the step before, where it is cumulative
    ahead: Ahead | None = None  # None until the next step asks for it

    def keep(self, mask: Tensor) -> None:
        """Drop the requests whose gate is closed: they cost no further draft work."""
        self.rows, self.tokens, self.positions = self.rows[mask], self.tokens[mask], self.positions[mask]
        for name in ("lengths", "limits", "previous"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, values[mask])
        self.ahead = None


@dataclass
class Ahead:
    """Attention metadata's parts for a round's next steps, one row a step."""

    positions: Tensor  # int64 [steps, n]
    seq_lens: Tensor  # int32 [steps, n]: tokens that a request attends to, its own included
    longest: int  # the greatest of the first step, of tokens that are attended to
    groups: list[tuple[Tensor, Tensor]]  # of each KV cache group: block table [n, blocks], slots int64 [steps, n]
    step: int = 0  # the next step's row

    @classmethod
    def of(
        cls, state: Round, steps: int, tables: Sequence[Any], requests: int, context: ContextKernel | None = None
    ) -> Ahead:
        """The next `steps` steps of `state`. tables: vLLM's, one a KV cache group; requests: in the batch.
        context: what leaves blocks out; None: the steps attend to all of the context."""
        positions = state.positions + torch.arange(steps).unsqueeze(1)  # [steps, n]
        groups = []
        for table in tables:
            blocks = table.get_device_tensor(requests)[state.rows]  # [n, blocks]
            # Steps past the end of the model's context are never run, and have no column in the table.
            column = (positions // table.block_size).clamp_max(blocks.shape[1] - 1)
            block = blocks.gather(1, column.T).T.contiguous()  # [steps, n]
            groups.append((blocks, block.long() * table.block_size + positions % table.block_size))
        attended = (positions + 1).int()
        if context is not None:
            size, seq_lens = tables[0].block_size, state.positions + 1  # of one KV cache (`refuse_context`)
            short, left_out = context.shortened(groups[0][0], seq_lens, size, state.rows)
            groups = [(short, slots) for _, slots in groups]
            attended -= left_out.int()
        return cls(positions, attended, int(attended[0].max()), groups)

    def metadata(
        self, groups: Sequence[tuple[vllm.AttentionGroup, list[str]]], starts: Tensor
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next step's attention metadata and slots [n] by layer name: a query token a request, which attends up to
        itself.
        groups: KV cache groups with the names of their layers that draft. starts: int32 0, 1, ..., at least n + 1."""
        seq_lens, n = self.seq_lens[self.step], self.seq_lens.shape[1]
        metadata: dict[str, Any] = {}
        slot_mappings: dict[str, Tensor] = {}
        for (group, names), (blocks, all_slots) in zip(groups, self.groups, strict=True):
            slots = all_slots[self.step]
            common = CommonAttentionMetadata(
                query_start_loc=starts[: n + 1],
                query_start_loc_cpu=starts[: n + 1],
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=n,
                num_actual_tokens=n,
                max_query_len=1,
                max_seq_len=self.longest + self.step,
                block_table_tensor=blocks,
                slot_mapping=slots,
                positions=self.positions[self.step],
            )
            built = group.get_metadata_builder().build(0, common)
            for name in names:
                metadata[name], slot_mappings[name] = built, slots
        self.step += 1
        return metadata, slot_mappings
