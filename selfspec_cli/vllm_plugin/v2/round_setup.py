"""How a round of the V2 draft loop begins on the device: what the verify pass left becomes the first draft step's
inputs, and each row gets its draft budget. `take_in` writes what is known of a request when it arrives; `begin_round`
reads it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit.length_table import LARGEST
from selfspec_cli.early_exit.resolved import RequestSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.v2.matches import judge, look_up
from selfspec_cli.vllm_plugin.v2.state import DraftState
from selfspec_cli.vllm_plugin.v2.worth import ROUNDS, count_step, join, judge_confidence


class Verdict(NamedTuple):
    """What a verify pass left on the device, int32 [rows]. seq_lens: tokens in the KV cache, rejected drafts included;
    num_sampled: tokens gained; num_rejected: draft slots that gave none; last_sampled [requests]: the newest token."""

    seq_lens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    last_sampled: Tensor


@dataclass(frozen=True)
class Ending:
    """Where a request ends: at `length` tokens, its prompt counted in, and after the token `stop` (-1: none).
    vLLM's scheduler begins a step before it has seen the tokens of the last one, so it also runs one for a request that
    has just ended. On the device the end is known at once, and nothing has to be drafted in vain while others wait."""

    length: int = LARGEST
    stop: int = -1

    @classmethod
    def of(cls, parameters: Any, prompt: int) -> Ending:
        """From a request's SamplingParams (None: nothing is known) and the length of its prompt. Other tokens than the
        model's own end of text may end a request too; those are left to vLLM."""
        most = None if parameters is None else parameters.max_tokens
        stop = None if parameters is None else parameters.eos_token_id  # None where it is to be ignored
        return cls(LARGEST if most is None else min(prompt + most, LARGEST), -1 if stop is None else stop)


@triton.jit
def _take_in(arrivals, lengths, budget, matches, WORDS: tl.constexpr, FREE: tl.constexpr):
    """One program for each new request, by its line of `arrivals`."""
    line = arrivals + WORDS * tl.program_id(0)
    request = tl.load(line)
    tl.store(budget.ends + request, tl.load(line + 1))
    tl.store(budget.stops + request, tl.load(line + 2))
    tl.store(budget.own_lengths + request, tl.load(line + 3))
    tl.store(budget.own_limits + request, tl.load(line + 4).to(tl.float32, bitcast=True))
    tl.store(lengths + request, 0)
    tl.store(matches.drafted + request, 0)
    if FREE:
        tl.store(matches.known + request, 0)


def take_in(
    state: DraftState,
    slots: Sequence[int],
    own: Sequence[RequestSettings],
    limits: Sequence[float],
    ends: Sequence[Ending],
) -> None:
    """New requests in `slots`. limits: what the gate compares with for each, NaN for the gate's own. One copy and one
    kernel, because under load most steps bring new requests, and the host launches this while others wait."""
    lines = [
        (slot, end.length, end.stop, LARGEST if one.k is None else one.k, *struct.unpack("i", struct.pack("f", limit)))
        for slot, one, limit, end in zip(slots, own, limits, ends, strict=True)
    ]
    _take_in[(len(lines),)](
        state.arrivals[: len(lines)].copy_(state.staged(lines), non_blocking=True),
        state.lengths,
        state.limits,
        state.matches,
        WORDS=state.arrivals.shape[1],
        FREE=state.free is not None,
    )


@triton.jit
def _by_table(
    row,
    request,
    real,
    inside,
    cached,
    inputs,
    budget,
    num_reqs,
    number_of_cells,
    ROWS: tl.constexpr,
    LIMITS: tl.constexpr,
):
    """The lengths that the table, and the request itself, allows each row; stores what the row's gate compares with."""
    allowed = tl.full((ROWS,), 0, tl.int32)
    for cell in range(number_of_cells):  # the last one that is reached is in force
        reached = (tl.load(budget.cells + 3 * cell) <= num_reqs) & (cached >= tl.load(budget.cells + 3 * cell + 1))
        allowed = tl.where(reached, tl.load(budget.cells + 3 * cell + 2), allowed)
    limit = tl.full((ROWS,), float("nan"), tl.float32)
    if LIMITS:
        limit = tl.load(budget.own_limits + request, mask=real, other=float("nan"))
    tl.store(inputs.row_limits + row, limit, mask=inside)
    return allowed, tl.load(budget.own_lengths + request, mask=real, other=0)


@triton.jit
def _store_first_inputs(row, request, inside, drafts, token, cached, inputs, K: tl.constexpr, ROWS: tl.constexpr):
    """The first draft step's inputs. A row that does not draft gets the request -1: no slot, attention or sampling."""
    token, position = tl.where(drafts, token, 0), tl.where(drafts, cached, 0)
    tl.store(inputs.input_ids + row, token, mask=inside)
    tl.store(inputs.positions + row, position.to(tl.int64), mask=inside)
    tl.store(inputs.sample_positions + row, position.to(tl.int64), mask=inside)
    tl.store(inputs.seq_lens + row, tl.where(drafts, cached + 1, 0), mask=inside)
    tl.store(inputs.requests + row, tl.where(drafts, request, -1), mask=inside)
    tl.store(inputs.idx_mapping + row, tl.where(drafts, request, -1), mask=inside)
    for place in tl.static_range(K):
        tl.store(inputs.draft_tokens + row * K + place, tl.full((ROWS,), 0, tl.int64), mask=inside)


@triton.jit
def _open_round(
    row,
    request,
    real,
    inside,
    drafts,
    allowed,
    lookup_room,
    progress,
    lengths,
    matches,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    FREE: tl.constexpr,
):
    """Progress of a round in which no draft step has been made, and drafts without a token."""
    tl.store(lengths + request, tl.full((ROWS,), 0, tl.int32), mask=real)
    count = tl.sum(drafts.to(tl.int32), axis=0)
    if FREE:  # the first step is counted when it is known who takes it
        tl.store(matches.room + row, tl.where(drafts, lookup_room, 0), mask=inside)
        tl.store(progress.step, -1)
    else:
        tl.store(matches.drafted + request, tl.full((ROWS,), 0, tl.int32), mask=real)
        tl.store(progress.step, 0)
    tl.store(progress.round_limit, tl.max(allowed, axis=0))
    tl.store(progress.active, count)
    tl.store(progress.going, 0)
    if count > 0:
        tl.store(progress.counts + ROUNDS, tl.load(progress.counts + ROUNDS) + 1)
        if not FREE:
            count_step(progress.counts, count, 0, K)


# Numbers that differ from round to round stand here one by one. Inside a tuple Triton 3.9 specialises them whatever
# `do_not_specialize` says, and a server would compile this kernel again at its first batch of one request.
@triton.jit(do_not_specialize=["num_reqs", "steps", "number_of_cells", "step_value", "k", "free", "free_requests"])
def _begin_round(
    inputs,
    progress,
    lengths,
    budget,
    worth,
    matches,
    verdict,
    num_reqs,
    max_num_reqs,
    max_model_len,
    steps,
    number_of_cells,
    step_value,
    k,
    free,
    free_requests,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LIMITS: tl.constexpr,
    FREE: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """One program for all rows; those past the batch are padding that does no attention work."""
    row = tl.arange(0, ROWS)
    inside, real = row < max_num_reqs, row < num_reqs
    tl.store(inputs.query_start_loc + row, tl.minimum(row, num_reqs), mask=row <= max_num_reqs)
    request = tl.load(inputs.idx_mapping + row, mask=real, other=-1)
    real = real & (request >= 0)
    sampled = tl.load(verdict.num_sampled + row, mask=real, other=0)
    # Tokens that the target has keys and values for: also the position of the token sampled after them.
    cached = tl.load(verdict.seq_lens + row, mask=real, other=0)
    cached -= tl.load(verdict.num_rejected + row, mask=real, other=0)
    # ---- how much each row may draft
    by_table, own = _by_table(
        row, request, real, inside, cached, inputs, budget, num_reqs, number_of_cells, ROWS, LIMITS
    )
    own = tl.minimum(own, tl.load(progress.limit))
    allowed = tl.minimum(by_table, tl.minimum(own, steps))
    # A limit of a request's own below k also limits its prompt-lookup draft. The table's limit does so only while many
    # requests run, or where it is 0.
    bound = tl.where((by_table > 0) & (num_reqs <= free_requests), own, tl.minimum(by_table, own))
    lookup_room = tl.where(bound >= k, tl.minimum(free, steps), tl.minimum(free, tl.minimum(bound, steps)))
    if MEASURES:
        tl.store(worth.step_value, step_value)
        tl.store(worth.stands + row, tl.full((ROWS,), 0.0, tl.float32) + join(worth), mask=inside)
    # A round yields one token more than it drafts, so what would lie beyond a request's end is not drafted.
    end = tl.minimum(tl.load(budget.ends + request, mask=real, other=0), max_model_len)
    allowed = tl.minimum(allowed, end - cached - 2)
    lookup_room = tl.minimum(lookup_room, end - cached - 2)
    token = tl.load(verdict.last_sampled + request, mask=real, other=0).to(tl.int32)
    ended = token == tl.load(budget.stops + request, mask=real, other=-1)
    # A request inside its prefill sampled nothing.
    drafts = real & (sampled > 0) & (allowed > 0) & ~ended
    allowed = tl.where(drafts, allowed, 0)
    tl.store(inputs.row_steps + row, allowed, mask=inside)
    _store_first_inputs(row, request, inside, drafts, token, cached, inputs, K, ROWS)
    _open_round(row, request, real, inside, drafts, allowed, lookup_room, progress, lengths, matches, K, ROWS, FREE)


def begin_round(
    state: DraftState,
    batch: vllm.InputBatch,
    steps: int,
    verdict: tuple[Tensor, Tensor, Tensor],
    own_limits: bool = True,
    dummy_run: bool = False,
) -> None:
    """Inputs of the first draft step, from what the verify pass left on the device, and free drafts if there are any.
    Rows that do not draft get the request -1; every row starts without a drafted token.
    verdict: num_sampled and num_rejected, int32 [rows], and last_sampled, [requests]. steps: most drafts this round.
    own_limits: whether thresholds of requests count; they are for the gate that the engine was started with."""
    rows, places = state.draft_tokens.shape
    free = None if dummy_run else state.free
    left = Verdict(batch.seq_lens, *verdict)
    if state.measures and not dummy_run:
        judge_confidence(state, batch, left.num_sampled)
    if free is not None:
        look_up(state, batch, left)
    _begin_round[(1,)](
        state.inputs,
        state.progress,
        state.lengths,
        state.limits,
        state.worth,
        state.matches,
        left,
        num_reqs=batch.num_reqs,
        max_num_reqs=rows,
        max_model_len=state.max_model_len,
        steps=steps,
        number_of_cells=len(state.limits.cells),
        step_value=float(state.step_value),
        k=places if free is None else free.k,
        free=0 if free is None else free.tokens,
        free_requests=0 if free is None else free.requests,
        K=places,
        ROWS=triton.next_power_of_2(rows + 1),
        LIMITS=own_limits,
        FREE=free is not None,
        MEASURES=state.measures,
    )
    if free is not None:
        judge(state, batch, left)
