"""What the V2 draft loop counts on the device, and the turn from one step to the next."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from selfspec_cli.early_exit import estimate
from selfspec_cli.vllm_plugin.v2.on_device import on_device

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState

# Places of the counters, in `DraftState.counts`; the histograms follow: rounds by length, tokens by position, steps by
# active rows.
ROUNDS, STEPS, DRAFTED, GATE_ENDED, NAN_LOGITS, FREE_DRAFTED, FREE_ACCEPTED, TOTALS = map(tl.constexpr, range(8))


@triton.jit
def count_step(counts, rows, step, K: tl.constexpr):
    """A draft step over so many rows is about to run; step: its number in the round, from 0."""
    tl.store(counts + STEPS, tl.load(counts + STEPS) + 1)
    tl.store(counts + DRAFTED, tl.load(counts + DRAFTED) + rows)
    place = counts + TOTALS + K + 1 + step
    tl.store(place, tl.load(place) + rows)
    place = counts + TOTALS + K + 1 + K + rows
    tl.store(place, tl.load(place) + 1)


_gain, _step_pays = on_device(estimate.gain), on_device(estimate.step_pays)


@triton.jit
def _close_if_a_step_costs_more(inputs, own, going, steps, cost, rows, ROWS: tl.constexpr):
    """Rows that go on after so many steps: `going`, or none, which are closed then. own: of `Matches`."""
    row = tl.arange(0, ROWS)
    request = tl.load(inputs.requests + row, mask=row < rows, other=-1)
    open_ = (request >= 0) & (tl.load(inputs.seq_lens + row, mask=row < rows, other=0) > 0)
    gains = _gain(tl.load(own + request, mask=open_, other=0.0), steps)
    requests = tl.sum((request >= 0).to(tl.int32), axis=0)
    if not _step_pays(tl.sum(tl.where(open_, gains, 0.0), axis=0), requests, steps, cost):
        tl.store(inputs.seq_lens + row, tl.full((ROWS,), 0, tl.int32), mask=open_)
        tl.store(inputs.idx_mapping + row, tl.full((ROWS,), -1, tl.int32), mask=open_)
        going = going * 0
    return going


@triton.jit
def _turn(progress, inputs, own, cost, rows, K: tl.constexpr, ROWS: tl.constexpr, FREE: tl.constexpr):
    """Between two steps, after every row has decided: who goes on, and what there is to count."""
    before, after, step = tl.load(progress.active), tl.load(progress.going), tl.load(progress.step) + 1
    if FREE:  # noqa: SIM102 - Triton leaves a branch out only where nothing but a constant decides
        if after > 0:
            after = _close_if_a_step_costs_more(inputs, own, after, step.to(tl.int32), cost, rows, ROWS)
    tl.store(progress.step, step)
    tl.store(progress.active, after)
    tl.store(progress.going, 0)
    if after > 0:
        count_step(progress.counts, after, step, K)
    elif before > 0:
        place = progress.counts + TOTALS + step
        tl.store(place, tl.load(place) + 1)
        if step < tl.load(progress.round_limit):
            tl.store(progress.counts + GATE_ENDED, tl.load(progress.counts + GATE_ENDED) + 1)


def turn(state: DraftState) -> None:
    """Count a step that has ended, and the one that begins."""
    rows, places = state.draft_tokens.shape
    free = state.free
    _turn[(1,)](
        state.progress(), state.inputs(), state.matches.own, 0.0 if free is None else free.cost, rows, K=places,
        ROWS=triton.next_power_of_2(rows), FREE=free is not None,
    )  # fmt: skip
