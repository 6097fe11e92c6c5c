"""Faults of drafting on vLLM's V1 model runner, which is what runs on the CPU."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.planted.v1 import after_verify, last_draft_is_wrong
from selfspec_cli.vllm_plugin.v1.round import Ahead
from selfspec_cli.vllm_plugin.wrap import Undo, wrap
from selfspec_faults import spoil

STALE = 2


def kv_slot(runner: Any) -> list[Undo]:
    """A draft step spoils the keys and values of the token before the newest one, in the layers that draft."""
    drafter, config = runner.drafter, runner.kv_cache_config

    def make(original: Any) -> Any:
        def propose(*args: Any, **kwargs: Any) -> Any:
            proposals = original(*args, **kwargs)
            batch = runner.input_batch
            rows = torch.tensor([row for row, draft in enumerate(proposals) if draft], dtype=torch.int64)
            position = (torch.from_numpy(batch.num_tokens_no_spec)[rows].long() - 2).clamp_min(0)
            for group, names in drafter._groups:
                table = batch.block_table[group.kv_cache_group_id]
                size = table.block_size
                block = table.get_device_tensor(batch.num_reqs)[rows, position // size].long()
                for name in names:
                    layer = runner.compilation_config.static_forward_context[name]
                    spoil(layer.kv_cache, block * size + position % size, config.num_blocks, size)
            return proposals

        return propose

    return [wrap(drafter, "propose", make)]


def gate_changes_output(runner: Any) -> list[Undo]:
    """Where a gate has ended a draft, the draft is taken without being verified; its last token is another one."""
    drafter = runner.drafter

    def change(sampled: Tensor, drafts: list[list[int]]) -> None:
        for row, draft in enumerate(drafts):
            if drafter.gate.kind != "none" and 0 < len(draft) < drafter.draft_length:
                sampled[row] = -1
                sampled[row, : len(draft)] = torch.tensor(draft, dtype=sampled.dtype)

    return [last_draft_is_wrong(runner), after_verify(runner, change)]


def other_request(runner: Any) -> list[Undo]:
    """The drafter reads the keys and values of the next request in the batch; what it writes goes to its own."""
    drafter = runner.drafter

    def make(original: Any) -> Any:
        def forward(state: Any) -> Tensor:
            if state.ahead is None:
                batch = runner.input_batch
                tables = [batch.block_table[group.kv_cache_group_id] for group, _ in drafter._groups]
                state.ahead = Ahead.of(state, drafter.settings.k, tables, batch.num_reqs)
                groups = [(blocks.roll(1, 0), slots) for blocks, slots in state.ahead.groups]
                state.ahead = replace(state.ahead, groups=groups)
            return original(state)

        return forward

    return [wrap(drafter, "_forward", make)]


def stale_after_preemption(runner: Any) -> list[Undo]:
    """A request that was preempted is drafted for at a length that it had before: its drafts are written over keys and
    values of tokens that count."""
    resumed: set[str] = set()

    def note(original: Any) -> Any:
        def update(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            resumed.update(scheduled.scheduled_cached_reqs.resumed_req_ids)
            return original(scheduled, *args, **kwargs)

        return update

    def begin(original: Any) -> Any:
        def start(batch: Any, *rest: Any) -> Any:
            state = original(batch, *rest)
            if state is not None:
                stale = torch.tensor([batch.req_ids[row] in resumed for row in state.rows.tolist()])
                state.positions = (state.positions - STALE * stale.long()).clamp_min(0)
            return state

        return start

    return [wrap(runner, "_update_states", note), wrap(runner.drafter, "_start", begin)]


FAULTS = {fault.__name__: fault for fault in (kv_slot, gate_changes_output, other_request, stale_after_preemption)}
