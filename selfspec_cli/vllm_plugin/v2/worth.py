"""What the V2 draft loop computes between two steps beside its tokens: every gate's statistic, whether another step is
worth its time (early_exit/confidence.py for a whole batch), and counters.

Triton compiles source text, and the registry of gates is known when this module is imported, so the function of their
statistics is written then, from the gates' own expressions. It computes all of them at every step, because a gate that
changes on a live engine is a number in device memory, and no kernel is compiled again for it.

Before a round `_judge_confidence` counts which drafts of the last round stood, by confidence, and `join` takes the
counts in; after each step a row's probability that its draft stands is multiplied by its new token's, and the loop ends
where what all rows together may still gain is less than the value of a step, which the host says (rule.Choice)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit import confidence
from selfspec_cli.early_exit.gates import GATES, Gate, device_features
from selfspec_cli.early_exit.gates.base import DEVICE_NAMES
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.v2.state import DraftState

FILE = "<gate statistics>"
_NUMBERS = [name for name in DEVICE_NAMES if name != "previous"]


def source(gates: Iterable[Gate]) -> str:
    """The Triton function `statistics`: float32 [PADDED], the statistic of the gate number c in place c.
    columns: 0, 1, ..., PADDED - 1. confidence and so on: `DEVICE_NAMES`. before: pointer to the row's statistics of the
    step before, read only where `later` (a step that is not the first)."""
    lines = [
        "@triton.jit",
        f"def statistics(columns, {', '.join(_NUMBERS)}, before, later):",
        "    values = tl.full(columns.shape, 0.0, tl.float32)",
    ]
    for column, gate in enumerate(gates):
        if gate.cumulative:
            lines.append(f"    previous = tl.load(before + {column}, mask=later, other=1.0)")
        lines.append(f"    values = tl.where(columns == {column}, ({gate.device}), values)  # {gate.name}")
    return "\n".join([*lines, "    return values", ""])


def compiled(text: str) -> Any:
    """The function of `source`, ready to be called by a kernel. Triton reads the text of what it compiles through
    `inspect`, and that reads it from `linecache`, which must know it: there is no file."""
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(text, FILE, "exec"), names)
    return names["statistics"]


FEATURES = device_features()
statistics = compiled(source(GATES[name] for name in FEATURES))
WIDTH = tl.constexpr(len(FEATURES))
PADDED = tl.constexpr(triton.next_power_of_2(len(FEATURES)))


# ---- what a step is worth ----------------------------------------------------------------------------------------

BINS = tl.constexpr(confidence.BINS)
MEMORY = tl.constexpr(confidence.MEMORY)
NEGLIGIBLE = tl.constexpr(confidence.NEGLIGIBLE)
CONFIDENCE = tl.constexpr(FEATURES.index("maxp"))
"""The column of `DraftState.statistics` that holds the greatest probability."""


@triton.jit
def _judge_confidence(
    worth, statistics, slots, matches, counts, num_sampled, K: tl.constexpr, PLACES: tl.constexpr, FREE: tl.constexpr
):
    """One program a row: which of its last drafts stood, by position of all [2, K], and by the model's confidence."""
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


# ---- counters ----------------------------------------------------------------------------------------------------

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
