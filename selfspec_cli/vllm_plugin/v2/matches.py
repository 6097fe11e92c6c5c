"""Free drafts on vLLM's V2 model runner: early_exit/free_drafts.py for a whole batch, on the device.

In front of the loop, `_look_up` finds the longest match of each request's last tokens, over blocks of its history;
`_judge`, one program a row, learns from the verify pass how often matches came true, and copies the draft of a row
whose match is trusted, which closes the row; then a step's end counts who is left, and ends the round where a step for
these costs all more than it brings. In the loop, `take_over` ends a row whose own draft made its match long enough."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit import free_drafts
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.v2.state import DraftState
from selfspec_cli.vllm_plugin.v2.worth import FREE_ACCEPTED, FREE_DRAFTED, turn

LONGEST = tl.constexpr(free_drafts.LONGEST)
WEIGHT = tl.constexpr(free_drafts.WEIGHT)
_BLOCK = 1024
"""Tokens of history a program; its 16 looks at them stop where nothing matches any more."""
_WIDE = tl.constexpr(1 << 32)


def _on_device(function: Any) -> Any:
    """`function` for a kernel to call. Triton wants its own language among what the function can see."""
    return triton.jit(FunctionType(function.__code__, {**function.__globals__, "tl": tl}, function.__name__))


_trials, _updated = _on_device(free_drafts.trials), _on_device(free_drafts.updated)


@triton.jit
def _look_up(matches, columns, slots, verdict, BLOCK: tl.constexpr):
    """One program for each row and block of its history."""
    row = tl.program_id(0)
    request = tl.load(slots + row).to(tl.int64)
    # Tokens, the one just sampled included.
    known = tl.load(verdict.seq_lens + row) - tl.load(verdict.num_rejected + row) + 1
    first = tl.program_id(1) * BLOCK
    if (request >= 0) & (tl.load(verdict.num_sampled + row) > 0) & (first < known):
        text = matches.text + request * columns
        ends = first + tl.arange(0, BLOCK)
        same, length = ends < known, tl.full((BLOCK,), 0, tl.int32)
        for back in tl.static_range(1, LONGEST + 1):
            same = same & (ends >= back)
            token = tl.load(text + ends - back, mask=same, other=-1)
            same = same & (token == tl.load(text + known - back, mask=known >= back, other=-2))
            length += same.to(tl.int32)
        best = tl.max(tl.where(length > 0, length.to(tl.int64) * _WIDE + ends, 0), axis=0)
        if best > 0:
            tl.atomic_max(matches.found + row, best)


@triton.jit
def _rates_after(rates, length, agreed, gained, lengths):
    """`free_drafts.learnt`."""
    right = ((lengths >= length) & (lengths < length + agreed)).to(tl.int32)
    right = tl.where(lengths == LONGEST, tl.maximum(0, agreed - (LONGEST - length)), right)
    wrong = (lengths == tl.minimum(length + agreed, LONGEST)) & (agreed < gained)
    return _updated(rates, right, right + wrong.to(tl.int32), WEIGHT)


@triton.jit
def _trusted_from(rates, own, tokens, k, cost, lengths):
    """`free_drafts.trusted_from`."""
    total, stands = tl.full(lengths.shape, 0.0, tl.float32), tl.full(lengths.shape, 1.0, tl.float32)
    for place in range(tokens):
        at = tl.minimum(lengths + place, LONGEST)
        stands *= tl.sum(tl.where(lengths[None, :] == at[:, None], rates[None, :], 0.0), axis=1)
        total += stands
    yields = own * 0.0
    for _ in range(k):
        yields = own * (1.0 + yields)
    doubtful = (1.0 + total) * (1.0 + cost * k) < 1.0 + yields
    return tl.max(tl.where(doubtful, lengths, 0), axis=0) + 1


@triton.jit
def _learn(row, request, known, accepted, matches, text, counts, tokens, lengths, PLACES: tl.constexpr):
    """The verdict on a request's last draft, and on its last match: its estimates by length, and of its own drafts."""
    before = tl.load(matches.known + request)
    seen = before > 0  # of a new request nothing is known
    rates = tl.load(matches.rates + request * LONGEST + lengths - 1)
    rates = tl.where(seen, rates, lengths / (lengths + 1.0))
    own = tl.load(matches.own + request, mask=seen, other=1.0)
    length = tl.load(matches.length + request, mask=seen, other=0)
    drafted = tl.load(matches.drafted + request, mask=seen, other=0)
    copied = tl.load(matches.copied + request, mask=seen, other=0)
    gained = tl.where(length > 0, tl.minimum(known - before, tokens + 1), 0)
    place = tl.arange(0, PLACES)
    compared = place < gained
    new = tl.load(text + before + place, mask=compared, other=-1)
    then = tl.load(text + tl.load(matches.start + request) + place, mask=compared, other=-1)
    agreed = tl.min(tl.where(compared & (new == then), PLACES, place), axis=0)
    rates = tl.where(gained > 0, _rates_after(rates, length, agreed, gained, lengths), rates)
    stood = tl.minimum(accepted, drafted)
    own = _updated(own, stood, tl.where(drafted > 0, _trials(stood, drafted), 0), WEIGHT)
    tl.store(matches.rates + request * LONGEST + lengths - 1, rates)
    tl.store(matches.own + request, own)
    free = tl.maximum(0, tl.minimum(accepted - drafted, copied))
    if free > 0:
        tl.atomic_add(counts + FREE_ACCEPTED, free.to(tl.int64))
    return rates, own


@triton.jit
def _copy(
    row,
    request,
    begin,
    room,
    known,
    start,
    text,
    matches,
    inputs,
    lengths,
    counts,
    K: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The rest of a row's draft, from place `begin` on, is what follows its match; the row is closed."""
    place = tl.arange(0, PLACES)
    here = (place >= begin) & (place < room)
    token = tl.load(text + start + place % (known - start), mask=here, other=0)
    tl.store(inputs.draft_tokens + row * K + place, token.to(tl.int64), mask=here)
    tl.store(lengths + request, room)
    tl.store(matches.copied + request, room - begin)
    tl.atomic_add(counts + FREE_DRAFTED, (room - begin).to(tl.int64))


@triton.jit(do_not_specialize=["tokens", "k"])
def _judge(
    matches,
    columns,
    slots,
    verdict,
    inputs,
    progress,
    lengths,
    tokens,
    k,
    cost,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    ALONE: tl.constexpr,
):
    """One program a row, after `round_setup._begin_round`, which says who may draft and how much. slots: int64 [rows],
    the request of each row, also of one that drafts nothing. ALONE: no layer drafts, so no row goes on, and any match
    is trusted, because there is no own draft (k = 0) that could yield more."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(slots + row).to(tl.int64)
    sampled = tl.load(verdict.num_sampled + row)
    found = tl.load(matches.found + row)
    tl.store(matches.found + row, tl.full((), 0, tl.int64))
    if (request >= 0) & (sampled > 0):
        text, by_length = matches.text + request * columns, 1 + tl.arange(0, LONGEST)
        known = tl.load(verdict.seq_lens + row) - tl.load(verdict.num_rejected + row) + 1
        rates, own = _learn(row, request, known, sampled - 1, matches, text, progress.counts, tokens, by_length, PLACES)
        length, start = (found // _WIDE).to(tl.int32), (found % _WIDE).to(tl.int32)
        room = tl.load(matches.room + row)
        most = tl.minimum(k, tl.load(inputs.row_steps + row))  # of the model's own draft in this round
        trusted = _trusted_from(rates, own, tl.minimum(tokens, room), most, cost, by_length)
        tl.store(matches.length + request, length)
        tl.store(matches.start + request, start)
        tl.store(matches.known + request, known)
        tl.store(matches.trusted + request, trusted)
        tl.store(matches.drafted + request, 0)
        tl.store(matches.copied + request, 0)
        room = tl.where(length > 0, room, 0)
        tl.store(matches.room + row, room)
        if tl.load(inputs.requests + row) >= 0:
            if (room > 0) & (length >= trusted):
                _copy(row, request, 0, room, known, start, text, matches, inputs, lengths, progress.counts, K, PLACES)
                tl.store(inputs.seq_lens + row, 0)
                tl.store(inputs.idx_mapping + row, -1)
            elif not ALONE:
                tl.atomic_add(progress.going, 1)


@triton.jit
def take_over(
    row, request, step, token, matches, columns, inputs, lengths, counts, K: tl.constexpr, PLACES: tl.constexpr
):
    """After a row's own token number `step`: whether its followed match is long enough now; then the rest is copied."""
    room, length = tl.load(matches.room + row), tl.load(matches.length + request)
    known, start = tl.load(matches.known + request), tl.load(matches.start + request)
    text, place = matches.text + request * columns, step.to(tl.int32)
    inside = place + 1 < room
    same = tl.load(text + start + place % tl.maximum(known - start, 1), mask=inside, other=-1) == token
    trusted = inside & same & (length + place + 1 >= tl.load(matches.trusted + request))
    if trusted:
        _copy(row, request, place + 1, room, known, start, text, matches, inputs, lengths, counts, K, PLACES)
    elif not same:
        tl.store(matches.room + row, 0)
    return trusted


@triton.jit
def _certain(
    logits, request_stride, place_stride, vocab_size, draft_tokens, matches, slots, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row, place and block of the vocabulary: a copied token was sure to be drafted."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(slots + row).to(tl.int64)
    if request >= 0:
        own, copied = tl.load(matches.drafted + request), tl.load(matches.copied + request)
        if (place >= own) & (place < own + copied):
            columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
            token = tl.load(draft_tokens + row * K + place)
            values = tl.where(columns == token, 0.0, -float("inf"))
            to = logits + request * request_stride + place * place_stride + columns
            tl.store(to, values.to(logits.dtype.element_ty), mask=columns < vocab_size)


def look_up(state: DraftState, batch: vllm.InputBatch, verdict: Any) -> None:
    """The longest match of each row's last tokens, into `state.matches.found`, 0 before; by a `round_setup.Verdict`."""
    longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max()) + 1  # on the host already
    _look_up[(batch.num_reqs, triton.cdiv(longest, _BLOCK))](
        state.matches, state.matches.text.stride(0), batch.idx_mapping, verdict, BLOCK=_BLOCK
    )


def judge(state: DraftState, batch: vllm.InputBatch, verdict: Any) -> None:
    """After `_begin_round`: learn from the verify pass, and copy the drafts of rows whose match is trusted."""
    assert state.free is not None
    places = state.draft_tokens.shape[1]
    _judge[(batch.num_reqs,)](
        state.matches,
        state.matches.text.stride(0),
        batch.idx_mapping,
        verdict,
        state.inputs,
        state.progress,
        state.lengths,
        state.free.tokens,
        0 if state.free.alone else state.free.k,
        state.step_cost / batch.num_reqs,
        K=places,
        PLACES=triton.next_power_of_2(places + 1),
        ALONE=state.free.alone,
    )
    turn(state)


def certain(state: DraftState, batch: vllm.InputBatch, logits: Tensor) -> None:
    """Behind a round: the draft distributions of copied tokens, for the verifier, into logits [requests, places, V]."""
    places, vocab = logits.shape[1:]
    _certain[(batch.num_reqs, places, triton.cdiv(vocab, 4096))](
        logits,
        logits.stride(0),
        logits.stride(1),
        vocab,
        state.draft_tokens,
        state.matches,
        batch.idx_mapping,
        K=places,
        BLOCK=4096,
    )
