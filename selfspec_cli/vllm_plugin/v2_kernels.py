"""Device-side bookkeeping of the V2 draft loop: the first step's inputs, and each next step's. No host reads."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
def _next_step(
    tokens,
    step_ptr,
    draft_tokens,
    draft_tokens_stride,
    input_ids,
    positions,
    seq_lens,
    sample_positions,
    max_model_len,
):
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens + row)
    if seq_len > 0:
        token = tl.load(tokens + row)
        tl.store(draft_tokens + row * draft_tokens_stride + tl.load(step_ptr), token)
        tl.store(input_ids + row, token.to(tl.int32))
        # At the model's end the last position is written again and again; the verify pass overwrites it.
        position = tl.minimum(tl.load(positions + row) + 1, max_model_len - 1)
        tl.store(positions + row, position)
        tl.store(sample_positions + row, position)
        tl.store(seq_lens + row, tl.minimum(seq_len + 1, max_model_len))


def next_step(
    tokens: Tensor,
    step: Tensor,
    draft_tokens: Tensor,
    buffers: InputBuffers,
    sample_positions: Tensor,
    num_reqs: int,
    max_model_len: int,
) -> None:
    """Store the drafted tokens [rows] in column `step` (a device scalar) and make them the next step's inputs."""
    kernel: Any = _next_step
    kernel[(num_reqs,)](
        tokens,
        step,
        draft_tokens,
        draft_tokens.stride(0),
        buffers.input_ids,
        buffers.positions,
        buffers.seq_lens,
        sample_positions,
        max_model_len,
    )
