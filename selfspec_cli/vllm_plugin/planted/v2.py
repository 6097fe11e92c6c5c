"""Faults on vLLM's V2 model runner, which is what runs on CUDA. Each function plants one and returns its undoing.

What is wrapped is called between CUDA graphs, never inside one, so a fault can come and go without a recapture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.planted.spoil import spoil
from selfspec_cli.vllm_plugin.wrap import Undo, Wrapped, wrap

BIAS, STALE = 1.3, 2


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

    return [_around_propose(runner, after=after)]


def accept_one_more(runner: Any) -> list[Undo]:
    """The last token of each draft is another one, and the first draft that is rejected is taken all the same."""

    def change(output: Any, batch: Any) -> None:
        starts, taken, places, lengths = _verdict(runner, output, batch)
        wrong = (taken > 0) & (taken <= torch.minimum(places, lengths))
        last = (taken - 1).clamp_min(0).unsqueeze(1)
        kept = output.sampled_token_ids.gather(1, last)
        draft = _draft(batch, starts + taken).unsqueeze(1).to(kept.dtype)
        output.sampled_token_ids.scatter_(1, last, torch.where(wrong.unsqueeze(1), draft, kept))

    return [_last_draft_is_wrong(runner), _after_verify(runner, change)]


def gate_changes_output(runner: Any) -> list[Undo]:
    """Where a gate has ended a draft, the draft is taken without being verified; its last token is another one."""
    state = runner.speculator.state

    def change(output: Any, batch: Any) -> None:
        starts, taken, places, lengths = _verdict(runner, output, batch)
        drafted = torch.minimum(places, lengths)
        ended = (taken > 0) & (drafted > 0) & (lengths < state.limit) & (state.gate_feature >= 0)
        for place in range(output.sampled_token_ids.shape[1] - 1):
            column = output.sampled_token_ids[:, place]
            draft = _draft(batch, starts + place + 1).to(column.dtype)
            column.copy_(torch.where(ended & (place < drafted), draft, column))
        output.num_rejected.add_(torch.where(ended, taken - drafted, 0).to(output.num_rejected.dtype))
        output.num_sampled.copy_(torch.where(ended, drafted, taken).to(output.num_sampled.dtype))

    return [_last_draft_is_wrong(runner), _after_verify(runner, change)]


def biased_sampler(runner: Any) -> list[Undo]:
    """Verified positions are sampled from a distribution that is too sharp; the most likely token stays that."""

    def make(original: Any) -> Any:
        def verify(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(logits * BIAS, *args, **kwargs)

        return Wrapped(original, verify)

    return [wrap(runner, "rejection_sampler", make)]


def other_request(runner: Any) -> list[Undo]:
    """The drafter reads the keys and values of the next request in the batch; what it writes goes to its own."""

    def before(batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> Tensor:
        for table in runner.block_tables.input_block_tables:  # the runner gathers them anew for each step
            table[: batch.num_reqs] = table[: batch.num_reqs].roll(1, 0)
        return num_rejected

    return [_around_propose(runner, before=before)]


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

    return [wrap(runner, "add_requests", note), _around_propose(runner, before=before)]


def _last_draft_is_wrong(runner: Any) -> Undo:
    """However good drafts are, there is one in each round that should be rejected; and its keys and values are those of
    the token that is verified."""

    def after(drafts: Tensor, batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> None:
        state = getattr(runner.speculator, "state", None)
        rows = batch.idx_mapping[: len(drafts)]
        count = drafts.new_full(rows.shape, drafts.shape[1]) if state is None else state.lengths[rows].long()
        last = (count - 1).clamp_min(0).unsqueeze(1)
        token = drafts.gather(1, last)
        drafts.scatter_(1, last, torch.where((count > 0).unsqueeze(1), (token - 1).abs(), token))

    return _around_propose(runner, after=after)


def _around_propose(
    runner: Any,
    before: Callable[[Any, Tensor, Tensor], Tensor] = lambda batch, num_sampled, num_rejected: num_rejected,
    after: Callable[[Tensor, Any, Tensor, Tensor], None] = lambda drafts, batch, num_sampled, num_rejected: None,
) -> Undo:
    """before: returns num_rejected as the draft loop is to see it."""

    def make(original: Any) -> Any:
        def propose(
            batch: Any, a: Any, b: Any, c: Any, d: Any, sampled: Tensor, rejected: Tensor, *rest: Any, **more: Any
        ) -> Tensor:
            if more.get("dummy_run"):
                return original(batch, a, b, c, d, sampled, rejected, *rest, **more)
            drafts = original(batch, a, b, c, d, sampled, before(batch, sampled, rejected), *rest, **more)
            after(drafts, batch, sampled, rejected)
            return drafts

        return propose

    return wrap(runner.speculator, "propose", make)


def _after_verify(runner: Any, change: Callable[[Any, Any], None]) -> Undo:
    def make(original: Any) -> Any:
        def verify(logits: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(logits, batch, *args, **kwargs)
            change(output, batch)
            return output

        return Wrapped(original, verify)

    return wrap(runner, "rejection_sampler", make)


def _verdict(runner: Any, output: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row, int64 [rows]: where its logits begin, tokens taken, places verified, tokens that were drafted."""
    ends, state = batch.cu_num_logits.long(), getattr(runner.speculator, "state", None)
    places = ends.diff() - 1
    lengths = places if state is None else state.lengths[batch.idx_mapping].long()
    return ends[:-1], output.num_sampled.long(), places, lengths


def _draft(batch: Any, logit: Tensor) -> Tensor:
    """The input tokens at these logits, which are the drafts; anything past the batch is read from its end."""
    places = batch.logits_indices
    return batch.input_ids[places[logit.clamp_max(places.shape[0] - 1)]]


FAULTS: dict[str, Callable[[Any], list[Undo]]] = {
    fault.__name__: fault
    for fault in (kv_slot, accept_one_more, gate_changes_output, biased_sampler, other_request, stale_after_preemption)
}
