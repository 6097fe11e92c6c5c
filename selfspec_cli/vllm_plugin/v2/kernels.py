"""What the V2 draft loop does on the device between two forward passes: end a step, count. How a round begins is in
round_setup.py.

Nothing here reads anything back to the host. One pass over the logits gives each row's best token and every gate
statistic; one program a row then decides, stores the token and prepares the next step, or closes the row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.vllm_plugin.v2.matches import take_over
from selfspec_cli.vllm_plugin.v2.state import DraftState
from selfspec_cli.vllm_plugin.v2.worth import NAN_LOGITS, PADDED, WIDTH, statistics, still_stands, turn


@triton.jit
def _reduce_block(logits, logits_stride, vocab_size, parts, indices, BLOCK: tl.constexpr):
    """What one block of a row's logits says: its best token, and sums from which all statistics follow.
    parts: [rows, 5, blocks]: greatest logit m and second greatest, the sum of e^(x - m), the mean of x - m under these
    weights, and the weighted sum of its squared deviations (E[x^2] - E[x]^2 would cancel in float32)."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * logits_stride + columns, mask=columns < vocab_size, other=-float("inf"))
    scores = scores.to(tl.float32)
    best, at = tl.max(scores, axis=0), tl.argmax(scores, axis=0)
    second = tl.max(tl.where(tl.arange(0, BLOCK) == at, -float("inf"), scores), axis=0)
    shifted = scores - tl.where(best == -float("inf"), 0.0, best)
    weight = tl.exp(shifted)  # NaN where a logit is NaN or +inf, and so is the sum
    total = tl.sum(weight, axis=0)
    mean = tl.sum(tl.where(weight > 0, weight * shifted, 0.0), axis=0) / tl.where(total > 0, total, 1.0)
    spread = tl.sum(tl.where(weight > 0, weight * (shifted - mean) * (shifted - mean), 0.0), axis=0)
    place = parts + row * 5 * blocks + block
    tl.store(place, best)
    tl.store(place + blocks, second)
    tl.store(place + 2 * blocks, total)
    tl.store(place + 3 * blocks, mean)
    tl.store(place + 4 * blocks, spread)
    tl.store(indices + row * blocks + block, block * BLOCK + at)


@triton.jit
def _join_blocks(parts, row, blocks, BLOCKS: tl.constexpr):
    """What the blocks of a row say together: its greatest logit and that block, the second greatest, and under the
    weights e^(x - greatest) their sum, the mean of x - greatest, and the sum of the squared deviations from it."""
    block = tl.arange(0, BLOCKS)
    here, place = block < blocks, parts + row * 5 * blocks + block
    maxima = tl.load(place, mask=here, other=-float("inf"))
    best, at = tl.max(maxima, axis=0), tl.argmax(maxima, axis=0)
    seconds = tl.where(
        block == at, tl.load(place + blocks, mask=here, other=-float("inf")), maxima
    )  # the best block's own runner-up, or another block's best
    second = tl.max(seconds, axis=0)
    shift = maxima - tl.where(best == -float("inf"), 0.0, best)
    scale = tl.exp(shift)
    weight = scale * tl.load(place + 2 * blocks, mask=here, other=0.0)
    total = tl.sum(weight, axis=0)  # e^(logsumexp - best), at least 1 where the logits are numbers
    centre = tl.where(weight > 0, shift + tl.load(place + 3 * blocks, mask=here, other=0.0), 0.0)
    mean = tl.sum(weight * centre, axis=0) / total
    spread = scale * tl.load(place + 4 * blocks, mask=here, other=0.0)
    spread += weight * (centre - mean) * (centre - mean)
    return best, at, second, total, mean, tl.sum(spread, axis=0)


@triton.jit
def _gate_is_open(row, columns, values, gate, row_limits):
    """Whether the gate in force lets a row go on after a step with these statistics, float32 [PADDED]."""
    feature, sign, own = tl.load(gate.feature), tl.load(gate.rule), tl.load(row_limits + row)
    threshold = tl.where(own == own, own, tl.load(gate.rule + 1))  # NaN: the request has none of its own
    value = tl.sum(tl.where(columns == feature, values, 0.0), axis=0)
    return (feature < 0) | (sign * value >= sign * threshold)


@triton.jit
def _go_on_or_close(row, step, token, goes_on, inputs, going):
    """The inputs of a row's next step; or, where it does not go on, none."""
    position = tl.load(inputs.positions + row) + 1
    if goes_on & (step + 1 < tl.load(inputs.row_steps + row)):
        tl.store(inputs.input_ids + row, token.to(tl.int32))
        tl.store(inputs.positions + row, position)
        tl.store(inputs.sample_positions + row, position)
        tl.store(inputs.seq_lens + row, (position + 1).to(tl.int32) - tl.load(inputs.left_out + row))
        tl.atomic_add(going, 1)
    else:  # closed: no attention, no KV slot and no sampling in later steps
        tl.store(inputs.seq_lens + row, 0)
        tl.store(inputs.idx_mapping + row, -1)


@triton.jit
def _drafted_token(row, at, tokens, indices, blocks, vocab_ids, GREEDY: tl.constexpr, MAPPED: tl.constexpr):
    """A row's token as an id of the full vocabulary: the one that was drawn, or the most likely one, of block `at`."""
    if GREEDY:
        token = tl.load(indices + row * blocks + at).to(tl.int64)
        if MAPPED:
            token = tl.load(vocab_ids + token)
    else:
        token = tl.load(tokens + row).to(tl.int64)
    return token


@triton.jit
def _end_step(
    tokens,
    parts,
    indices,
    blocks,
    vocab_ids,
    inputs,
    progress,
    gate,
    lengths,
    logged,
    worth,
    matches,
    columns_of_text,
    K: tl.constexpr,
    GREEDY: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    FREE: tl.constexpr,
    MEASURES: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One program a row. logged: float32 [requests, K, WIDTH], the statistics of each step of the round."""
    row = tl.program_id(0).to(tl.int64)
    request, step = tl.load(inputs.requests + row), tl.load(progress.step)
    if (tl.load(inputs.seq_lens + row) > 0) & (request >= 0):
        best, at, second, total, mean, spread = _join_blocks(parts, row, blocks, BLOCKS)
        good = (total >= 1.0) & (best < float("inf")) & (best > -float("inf"))  # NaN compares false
        confidence = 1.0 / total
        columns = tl.arange(0, PADDED)
        row_statistics = logged + (request * K + step) * WIDTH
        values = statistics(
            columns,
            confidence,
            confidence * tl.exp(second - best),
            tl.log(total) - mean,
            spread / total,
            best,
            best + tl.log(total),
            row_statistics - WIDTH,
            step > 0,
        )
        tl.store(row_statistics + columns, values, mask=columns < WIDTH)
        passes = _gate_is_open(row, columns, values, gate, inputs.row_limits)
        token = _drafted_token(row, at, tokens, indices, blocks, vocab_ids, GREEDY, MAPPED)
        if MEASURES:
            passes = passes & still_stands(worth, row, tl.where(good, confidence, 0.0))
        if good:
            tl.store(inputs.draft_tokens + row * K + step, token)
            tl.store(lengths + request, (step + 1).to(tl.int32))
            tl.store(matches.drafted + request, (step + 1).to(tl.int32))
            if FREE:
                taken = take_over(
                    row, request, step, token, matches, columns_of_text, inputs, lengths, progress.counts, K, PLACES
                )
                passes = passes & (taken == 0)
        else:  # logits that are no numbers propose nothing and close the gate, whatever it is
            tl.atomic_add(progress.counts + NAN_LOGITS, 1)
        _go_on_or_close(row, step, token, good & passes, inputs, progress.going)


class EndStep:
    """Ends a draft step: takes each row's token, computes the gate's statistics, and opens or closes the row.
    Two small kernels over the whole device, and one program that counts; PyTorch's argmax alone would give a row of 128
    thousand logits to few multiprocessors. vocab_size: V'. vocab_ids: int64 [V'], draft id -> token id, or None."""

    _BLOCK = 2048  # logits a program; 63 programs a row at a vocabulary of 128,256

    def __init__(self, max_rows: int, vocab_size: int, vocab_ids: Tensor | None, device: torch.device) -> None:
        self.vocab_size, self.vocab_ids = vocab_size, vocab_ids
        self.blocks = -(-vocab_size // self._BLOCK)
        self.parts = torch.empty(max_rows, 5, self.blocks, dtype=torch.float32, device=device)
        self.indices = torch.empty(max_rows, self.blocks, dtype=torch.int32, device=device)

    def __call__(self, state: DraftState, logits: Tensor, tokens: Tensor | None = None) -> None:
        """logits: [rows, V'] of the draft distribution, before any sampling.
        tokens: int64 [rows] as ids of the full vocabulary where they were drawn already; None takes the most likely."""
        rows, k = logits.shape[0], state.draft_tokens.shape[1]
        _reduce_block[(rows, self.blocks)](
            logits, logits.stride(0), self.vocab_size, self.parts, self.indices, BLOCK=self._BLOCK
        )
        _end_step[(rows,)](
            self.indices if tokens is None else tokens,
            self.parts,
            self.indices,
            self.blocks,
            self.indices if self.vocab_ids is None else self.vocab_ids,
            state.inputs,
            state.progress,
            state.gate,
            state.lengths,
            state.statistics,
            state.worth,
            state.matches,
            state.matches.text.stride(0),
            K=k,
            GREEDY=tokens is None,
            MAPPED=self.vocab_ids is not None,
            BLOCKS=triton.next_power_of_2(self.blocks),
            FREE=state.free is not None,
            MEASURES=state.measures,
            PLACES=triton.next_power_of_2(k + 1),
        )
        turn(state)


@triton.jit
def _undrafted(mask, local_positions, mapping, lengths, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    drafted = tl.load(lengths + tl.load(mapping + place, mask=inside, other=0), mask=inside, other=0)
    local = tl.load(local_positions + place, mask=inside, other=0)  # 0: the token sampled last, j: the j-th draft
    tl.store(mask + place, local > drafted, mask=inside)


def undrafted(local_positions: Tensor, mapping: Tensor, lengths: Tensor) -> Tensor:
    """Which input tokens of a verify pass stand where nothing was drafted, bool [logits]. local_positions, mapping:
    [logits] place in its request's draft, and request. lengths: int32 [requests], tokens that each drafted."""
    count, block = local_positions.shape[0], 1024
    mask = torch.empty(count, dtype=torch.bool, device=local_positions.device)
    _undrafted[(triton.cdiv(count, block),)](mask, local_positions, mapping, lengths, count, BLOCK=block)
    return mask
