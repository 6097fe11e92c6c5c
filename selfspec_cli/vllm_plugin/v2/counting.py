"""What the V2 draft loop counts on the device, and the turn from one step to the next."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from selfspec_cli.vllm_plugin.v2.worth import close_unless_worth

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState

# Places of the counters, in `Progress.counts`; the histograms follow: rounds by length, tokens by position, steps by
# active rows.
ROUNDS, STEPS, DRAFTED, GATE_ENDED, NAN_LOGITS, FREE_DRAFTED, FREE_ACCEPTED, TOTALS = map(tl.constexpr, range(8))


@triton.jit
def count_step(counts, rows, step, K: tl.constexpr):
    """A draft step over so many rows is about to run; step: its number in the round, from 0."""
    tl.store(counts + STEPS, tl.load(counts + STEPS) + 1)
    tl.store(counts + DRAFTED, tl.load(counts + DRAFTED) + rows)
    place = counts + TOTALS + K + 1 + step
    tl.store(place, tl.load(place) + rows)
    place = counts + TOTALS + K + 1 + 3 * K + rows
    tl.store(place, tl.load(place) + 1)


@triton.jit
def _turn(progress, inputs, worth, rows, K: tl.constexpr, ROWS: tl.constexpr, MEASURES: tl.constexpr):
    """Between two steps, after every row has decided: who goes on, and what there is to count. The first step is left
    out as not worth its time only if some rows copied their drafts: without drafts there would be no verdicts."""
    before, after, step = tl.load(progress.active), tl.load(progress.going), tl.load(progress.step) + 1
    if MEASURES:  # noqa: SIM102 - Triton leaves a branch out only where nothing but a constant decides
        if (after > 0) & ((step > 0) | (after < before)):
            after = close_unless_worth(worth, inputs, after, rows, ROWS)
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
    _turn[(1,)](
        state.progress,
        state.inputs,
        state.worth,
        rows,
        K=places,
        ROWS=triton.next_power_of_2(rows),
        MEASURES=state.measures,
    )
