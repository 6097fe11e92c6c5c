"""Whether another draft step is worth its time, on the device: early_exit/confidence.py for a whole batch.

Before a round `_judge_confidence` counts which drafts of the last round stood, by confidence, and `join` takes the
counts in; after each step a row's probability that its draft stands is multiplied by its new token's, and the loop ends
where what all rows together may still gain is less than the value of a step, which the host says (rule.Choice).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit import confidence
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.v2.statistics import FEATURES, WIDTH

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState
BINS = tl.constexpr(confidence.BINS)
MEMORY = tl.constexpr(confidence.MEMORY)
NEGLIGIBLE = tl.constexpr(confidence.NEGLIGIBLE)
CONFIDENCE = tl.constexpr(FEATURES.index("maxp"))
"""The column of `DraftState.statistics` that holds the greatest probability."""


@triton.jit
def _judge_confidence(
    worth, statistics, slots, matches, counts, num_sampled, K: tl.constexpr, PLACES: tl.constexpr, FREE: tl.constexpr
):
    """One program a row: its drafts of the last round, and how many of them stood. counts: [2, K], by position, of all;
    confidence is of the model's own."""
    row = tl.program_id(0)
    request, sampled = tl.load(slots + row).to(tl.int64), tl.load(num_sampled + row)
    if (request >= 0) & (sampled > 0):
        own, place = tl.load(matches.drafted + request), tl.arange(0, PLACES)
        whole = own
        if FREE:
            whole += tl.load(matches.copied + request)
        stood = tl.minimum(sampled - 1, whole)
        judged = (place < whole) & (place <= stood) & (place < K)
        tl.atomic_add(counts + place, 1, mask=judged)
        tl.atomic_add(counts + K + place, 1, mask=judged & (place < stood))
        judged = judged & (place < own)
        value = tl.load(statistics + (request * K + place) * WIDTH + CONFIDENCE, mask=judged, other=0.0)
        at = tl.minimum((value * BINS).to(tl.int32), BINS - 1)
        tl.atomic_add(worth.fresh + at, 1.0, mask=judged & (place < stood))
        tl.atomic_add(worth.fresh + BINS + at, 1.0, mask=judged)


def judge_confidence(state: DraftState, batch: vllm.InputBatch, num_sampled: Tensor) -> None:
    """Count the drafts of the last round by confidence. num_sampled: int32 [rows], tokens that each row gained."""
    places = state.draft_tokens.shape[1]
    _judge_confidence[(batch.num_reqs,)](
        state.worth,
        state.statistics,
        batch.idx_mapping,
        state.matches,
        state.judged_counts,
        num_sampled,
        K=places,
        PLACES=triton.next_power_of_2(places),
        FREE=state.free is not None,
    )


@triton.jit
def join(worth):
    """`confidence.faded`: take in what the round before showed. The usual acceptance, of which nothing is known."""
    bins = tl.arange(0, BINS)
    stood, judged = tl.load(worth.fresh + bins), tl.load(worth.fresh + BINS + bins)
    share = MEMORY / (MEMORY + tl.sum(judged, axis=0))
    first_stood, first_judged = tl.load(worth.first + bins), tl.load(worth.first + BINS + bins)
    stood += first_stood + (tl.load(worth.counts + bins) - first_stood) * share
    judged += first_judged + (tl.load(worth.counts + BINS + bins) - first_judged) * share
    tl.store(worth.counts + bins, stood)
    tl.store(worth.counts + BINS + bins, judged)
    tl.store(worth.rates + bins, stood / judged)
    nothing = tl.full((BINS,), 0.0, tl.float32)
    tl.store(worth.fresh + bins, nothing)
    tl.store(worth.fresh + BINS + bins, nothing)
    return tl.sum(stood, axis=0) / tl.sum(judged, axis=0)


@triton.jit
def still_stands(worth, row, token_confidence):
    """Whether a row's draft may still stand after a token of this confidence; keeps the probability."""
    at = tl.minimum((token_confidence * BINS).to(tl.int32), BINS - 1)
    stands = tl.load(worth.stands + row) * tl.load(worth.rates + at)
    tl.store(worth.stands + row, stands)
    return stands >= NEGLIGIBLE


@triton.jit
def close_unless_worth(worth, inputs, going, rows, ROWS: tl.constexpr):
    """Rows that go on: `going`, or none, which are closed then, where they gain less than a step is worth."""
    row = tl.arange(0, ROWS)
    request = tl.load(inputs.requests + row, mask=row < rows, other=-1)
    open_ = (request >= 0) & (tl.load(inputs.seq_lens + row, mask=row < rows, other=0) > 0)
    gain = tl.sum(tl.load(worth.stands + row, mask=open_, other=0.0), axis=0)
    if gain < tl.load(worth.step_value):
        tl.store(inputs.seq_lens + row, tl.full((ROWS,), 0, tl.int32), mask=open_)
        tl.store(inputs.idx_mapping + row, tl.full((ROWS,), -1, tl.int32), mask=open_)
        going = going * 0
    return going
