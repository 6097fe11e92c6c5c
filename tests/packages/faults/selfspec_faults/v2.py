"""Faults of drafting on vLLM's V2 model runner, which is what runs on CUDA."""

from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.planted.v2 import after_verify, around_propose, draft_at, last_draft_is_wrong, verdict_of
from selfspec_cli.vllm_plugin.wrap import Undo, wrap
from selfspec_faults import spoil

STALE = 2


def kv_slot(runner: Any) -> list[Undo]:
    """A draft step spoils the keys and values of the token before the newest one, in the layers that draft."""
    speculator = runner.speculator

    def after(drafts: Tensor, batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> None:
        rows = batch.num_reqs
        known = batch.seq_lens[:rows] - num_rejected[:rows]
        starts = torch.arange(rows + 1, dtype=torch.int32, device=known.device)
        out = torch.zeros_like(runner.block_tables.slot_mappings)
        positions = (known - 1).clamp_min(0).to(batch.positions.dtype)
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping[:rows], starts, positions, rows, out=out
        )  # [groups, rows]
        slots = slots.masked_fill((num_sampled[:rows] < 1).unsqueeze(0), -1)
        config = runner.kv_cache_config
        for number, group in enumerate(config.kv_cache_groups):
            size = runner.block_tables.block_sizes[number]
            total = config.num_blocks * group.kv_cache_spec.block_size // size
            for name in set(group.layer_names) & set(speculator._layer_names):
                layer = runner.compilation_config.static_forward_context[name]
                spoil(layer.kv_cache, slots[number], total, size)

    return [around_propose(runner, after=after)]


def gate_changes_output(runner: Any) -> list[Undo]:
    """Where a gate has ended a draft, the draft is taken without being verified; its last token is another one."""
    state = runner.speculator.state

    def change(output: Any, batch: Any) -> None:
        starts, taken, places, lengths = verdict_of(runner, output, batch)
        drafted = torch.minimum(places, lengths)
        ended = (taken > 0) & (drafted > 0) & (lengths < state.progress.limit) & (state.gate.feature >= 0)
        for place in range(output.sampled_token_ids.shape[1] - 1):
            column = output.sampled_token_ids[:, place]
            draft = draft_at(batch, starts + place + 1).to(column.dtype)
            column.copy_(torch.where(ended & (place < drafted), draft, column))
        output.num_rejected.add_(torch.where(ended, taken - drafted, 0).to(output.num_rejected.dtype))
        output.num_sampled.copy_(torch.where(ended, drafted, taken).to(output.num_sampled.dtype))

    return [last_draft_is_wrong(runner), after_verify(runner, change)]


def other_request(runner: Any) -> list[Undo]:
    """The drafter reads the keys and values of the next request in the batch; what it writes goes to its own."""

    def before(batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> Tensor:
        for table in runner.block_tables.input_block_tables:  # the runner gathers them anew for each step
            table[: batch.num_reqs] = table[: batch.num_reqs].roll(1, 0)
        return num_rejected

    return [around_propose(runner, before=before)]


def stale_after_preemption(runner: Any) -> list[Undo]:
    """A request that was preempted is drafted for at a length that it had before: its drafts are written over keys and
    values of tokens that count."""
    resumed: set[str] = set()

    def note(original: Any) -> Any:
        def add(scheduled: Any) -> Any:
            new = scheduled.scheduled_new_reqs  # a preempted request comes back as a new one with a longer prefill
            resumed.update(one.req_id for one in new if len(one.prefill_token_ids) > one.prompt_len)
            return original(scheduled)

        return add

    def before(batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> Tensor:
        stale = torch.tensor([name in resumed for name in batch.req_ids], device=num_rejected.device)
        rows = slice(0, len(batch.req_ids))
        later = num_rejected.clone()
        room = batch.seq_lens[rows] - num_rejected[rows] > STALE
        later[rows] += STALE * (stale & room & (num_sampled[rows] > 0)).to(later.dtype)
        return later

    return [wrap(runner, "add_requests", note), around_propose(runner, before=before)]


FAULTS = {fault.__name__: fault for fault in (kv_slot, gate_changes_output, other_request, stale_after_preemption)}
