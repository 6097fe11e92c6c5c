"""Device-side bookkeeping of the V2 draft loop: the first step's inputs, and each next step's. No host reads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers


@triton.jit
def _begin_round(
    input_ids,
    positions,
    seq_lens,
    query_start_loc,
    sample_positions,
    idx_mapping,
    draft_tokens,
    draft_tokens_stride,
    target_seq_lens,
    num_sampled,
    num_rejected,
    last_sampled,
    num_reqs,
    max_num_reqs,
    max_model_len,
    K: tl.constexpr,
):
    """One program a row of the persistent buffers; rows past the batch are padding that does no attention work."""
    row = tl.program_id(0)
    real = row < num_reqs
    tl.store(query_start_loc + row, tl.minimum(row, num_reqs))
    if row < max_num_reqs:
        request = tl.load(idx_mapping + row)
        sampled = tl.load(num_sampled + row, mask=real, other=0)
        # Tokens that the target has keys and values for: also the position of the token sampled after them.
        known = tl.load(target_seq_lens + row, mask=real, other=0) - tl.load(num_rejected + row, mask=real, other=0)
        # A request inside its prefill sampled nothing, and one at the end of the model has no place for a draft.
        active = real & (sampled > 0) & (known < max_model_len - 1) & (request >= 0)
        token = tl.load(last_sampled + request, mask=active, other=0)
        position = tl.where(active, known, 0)
        tl.store(input_ids + row, token.to(tl.int32))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(sample_positions + row, position.to(tl.int64))
        tl.store(seq_lens + row, tl.where(active, known + 1, 0))
        if real & (active == 0):
            # No slot, no attention, no draft: -1 is what the sampler, the block tables and the verifier skip.
            tl.store(idx_mapping + row, -1)
        for step in tl.static_range(K):
            tl.store(draft_tokens + row * draft_tokens_stride + step, -1)


def begin_round(
    buffers: InputBuffers,
    idx_mapping: Tensor,
    sample_positions: Tensor,
    draft_tokens: Tensor,
    batch: InputBatch,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    max_model_len: int,
) -> None:
    """Inputs of the first draft step, from what the verify pass left on the device.

    buffers: the drafter's persistent inputs, written for all rows. idx_mapping: row -> request, int64 [max rows]; rows
    that do not draft become -1. sample_positions: int64 [max rows]. draft_tokens: int64 [max rows, k], set to -1.
    num_sampled, num_rejected: int32 [rows]. last_sampled: [requests].
    """
    rows, k = draft_tokens.shape
    _begin_round[(rows + 1,)](
        buffers.input_ids,
        buffers.positions,
        buffers.seq_lens,
        buffers.query_start_loc,
        sample_positions,
        idx_mapping,
        draft_tokens,
        draft_tokens.stride(0),
        batch.seq_lens,
        num_sampled,
        num_rejected,
        last_sampled,
        batch.num_reqs,
        rows,
        max_model_len,
        K=k,
    )


@triton.jit
def _block_maxima(logits, logits_stride, vocab_size, values, indices, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * logits_stride + columns, mask=columns < vocab_size, other=-float("inf"))
    place = row * tl.num_programs(1) + block
    tl.store(values + place, tl.max(scores.to(tl.float32), axis=0))
    tl.store(indices + place, block * BLOCK + tl.argmax(scores.to(tl.float32), axis=0))


@triton.jit
def _next_step(
    tokens,
    values,
    indices,
    blocks,
    vocab_ids,
    step_ptr,
    draft_tokens,
    draft_tokens_stride,
    input_ids,
    positions,
    seq_lens,
    sample_positions,
    max_model_len,
    GREEDY: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens + row)
    if seq_len > 0:
        if GREEDY:
            block = tl.arange(0, BLOCKS)
            maxima = tl.load(values + row * blocks + block, mask=block < blocks, other=-float("inf"))
            token = tl.load(indices + row * blocks + tl.argmax(maxima, axis=0)).to(tl.int64)
            if MAPPED:
                token = tl.load(vocab_ids + token)
        else:
            token = tl.load(tokens + row)
        tl.store(draft_tokens + row * draft_tokens_stride + tl.load(step_ptr), token)
        tl.store(input_ids + row, token.to(tl.int32))
        # At the model's end the last position is written again and again; the verify pass overwrites it.
        position = tl.minimum(tl.load(positions + row) + 1, max_model_len - 1)
        tl.store(positions + row, position)
        tl.store(sample_positions + row, position)
        tl.store(seq_lens + row, tl.minimum(seq_len + 1, max_model_len))


class NextStep:
    """Ends a draft step: picks the tokens, stores them, and makes them the inputs of the step after.

    Greedy tokens come straight from the logits, in two small kernels over the whole device; PyTorch's argmax gives a
    row of 128 thousand logits to few of its multiprocessors. vocab_size: columns of the draft logits, V'. vocab_ids:
    int64 [V'], draft id -> token id, or None.
    """

    _BLOCK = 2048  # logits a program; 63 programs a row at a vocabulary of 128,256

    def __init__(self, max_rows: int, vocab_size: int, vocab_ids: Tensor | None, device: torch.device) -> None:
        self.vocab_size, self.vocab_ids = vocab_size, vocab_ids
        self.blocks = -(-vocab_size // self._BLOCK)
        self.values = torch.empty(max_rows, self.blocks, dtype=torch.float32, device=device)
        self.indices = torch.empty(max_rows, self.blocks, dtype=torch.int32, device=device)

    def greedy(
        self, logits: Tensor, step: Tensor, draft_tokens: Tensor, buffers: InputBuffers, positions: Tensor, limit: int
    ) -> None:
        """The most likely token of each row. logits: [rows, V'].

        step: device scalar, the column of draft_tokens [max rows, k] to write. positions: of the sampling keys,
        int64 [max rows]. limit: tokens that the model has room for.
        """
        _block_maxima[(logits.shape[0], self.blocks)](
            logits, logits.stride(0), self.vocab_size, self.values, self.indices, BLOCK=self._BLOCK
        )
        self._store(logits.shape[0], logits, True, step, draft_tokens, buffers, positions, limit)

    def given(
        self, tokens: Tensor, step: Tensor, draft_tokens: Tensor, buffers: InputBuffers, positions: Tensor, limit: int
    ) -> None:
        """Tokens already drawn, int64 [rows], as ids of the full vocabulary; the rest as for `greedy`."""
        self._store(tokens.shape[0], tokens, False, step, draft_tokens, buffers, positions, limit)

    def _store(
        self,
        rows: int,
        tokens: Tensor,
        greedy: bool,
        step: Tensor,
        draft_tokens: Tensor,
        buffers: InputBuffers,
        positions: Tensor,
        limit: int,
    ) -> None:
        _next_step[(rows,)](
            tokens,
            self.values,
            self.indices,
            self.blocks,
            self.indices if self.vocab_ids is None else self.vocab_ids,
            step,
            draft_tokens,
            draft_tokens.stride(0),
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            positions,
            limit,
            GREEDY=greedy,
            MAPPED=self.vocab_ids is not None,
            BLOCKS=triton.next_power_of_2(self.blocks),
        )
