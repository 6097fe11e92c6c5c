"""The tensors of a round in groups, as kernels take them: named tuples, which Triton passes field by field. A row is a
place in the batch; a request is vLLM's slot for one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit import confidence, free_drafts


class RoundInputs(NamedTuple):
    """What a draft step reads of each row and writes for the step after.

    Tokens, positions, sequence lengths (0: a row that does no work) and query starts are vLLM's input buffers.
    sample_positions: int64. idx_mapping, requests: int64, row -> request, -1 for a row that does not draft; the first
    is closed with the gate. draft_tokens: int64 [rows, k], 0 where nothing was drafted. row_steps: int32, most drafts
    this round. row_limits: float32, what the gate compares with, NaN for the gate's own threshold. left_out: int32,
    tokens of the context that the row's drafts do not attend to.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    sample_positions: Tensor
    idx_mapping: Tensor
    requests: Tensor
    draft_tokens: Tensor
    row_steps: Tensor
    row_limits: Tensor
    left_out: Tensor


class Progress(NamedTuple):
    """The scalars of a round, and the counters.

    limit: most drafts a round; round_limit: the most of any row this round. active, going: rows in this step, and rows
    that go on after it. counts: int64, see counting.py.
    """

    step: Tensor
    limit: Tensor
    round_limit: Tensor
    active: Tensor
    going: Tensor
    counts: Tensor


class GateRule(NamedTuple):
    """The gate in force: its statistic's number (-1: always open), and its sign and threshold, float32 [2]."""

    feature: Tensor
    rule: Tensor


class Limits(NamedTuple):
    """What limits each draft.

    cells: int32 [cells, 3], requests, context and length of each entry of the table of lengths, in its order.
    own_lengths, own_limits: int32 and float32 [requests], what each request asked for (LARGEST and NaN: nothing).
    ends, stops: int32 [requests], `round_setup.Ending` of each.
    """

    cells: Tensor
    own_lengths: Tensor
    own_limits: Tensor
    ends: Tensor
    stops: Tensor


class Free(NamedTuple):
    """What bounds drafts where there are free ones: tokens of a free one, k of the model's own, and the number of
    requests up to which the table bounds the model's own drafts alone. alone: whether no layer drafts."""

    tokens: int
    k: int
    requests: int = 0
    alone: bool = False


class Matches(NamedTuple):
    """What the histories say; see `free_drafts.Matches`.

    text: int32 [requests, tokens], vLLM's own record of each request's tokens. found: int64 [rows], of the look-up: the
    length of the match in the high half and its place in the low one, 0 for none.
    Requests: rates (float32 [requests, LONGEST]), own (float32), and as int32 length, start, known, trusted, drafted
    and copied. room: int32 [rows], most tokens of the draft of each; 0 where the match is not followed (any more).
    """

    text: Tensor
    found: Tensor
    rates: Tensor
    own: Tensor
    length: Tensor
    start: Tensor
    known: Tensor
    trusted: Tensor
    drafted: Tensor
    copied: Tensor
    room: Tensor

    @classmethod
    def of(cls, requests: int, text: Tensor | None, device: torch.device) -> Matches:
        """For `requests` slots of requests. text: None without free drafts; nothing reads the tensors then."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        some = requests if text is not None else 1
        return cls(
            text=zeros(1, 1) if text is None else text,
            found=zeros(some, dtype=torch.int64),
            rates=zeros(some, free_drafts.LONGEST, dtype=torch.float32),
            own=zeros(some, dtype=torch.float32),
            length=zeros(some),
            start=zeros(some),
            known=zeros(some),
            trusted=zeros(some),
            drafted=zeros(requests),
            copied=zeros(some),
            room=zeros(some),
        )


class Worth(NamedTuple):
    """What the loop's end is decided by.

    first, counts, fresh: float32 [2, BINS], tokens that stood and that were judged: the first guess, all, and those of
    the round before. rates: float32 [BINS], estimated acceptance by confidence. stands: float32 [rows], the probability
    that the draft of each row and its next token stand. step_value: float32 [1], tokens that a step has to bring.
    """

    first: Tensor
    counts: Tensor
    fresh: Tensor
    rates: Tensor
    stands: Tensor
    step_value: Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Worth:
        """Before anything is known, for `rows` rows; a step has no value to reach, so that drafts go on."""
        first = confidence.first_counts()
        return cls(
            first=first.to(device),
            counts=first.clone().to(device),
            fresh=torch.zeros_like(first, device=device),
            rates=confidence.rates(first).to(device),
            stands=torch.ones(rows, device=device),
            step_value=torch.zeros(1, device=device),
        )
