"""Everything that the V2 draft loop keeps on the device, in groups that kernels take: named tuples, which Triton passes
field by field. And the gate that can change there without a recapture, and the record of drafts.

A row is a place in the batch; a request is vLLM's slot for one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit import confidence, free_drafts
from selfspec_cli.early_exit.counters import JUDGED, STOOD, Snapshot
from selfspec_cli.early_exit.gates import GATES, check_threshold, device_features, require_device
from selfspec_cli.early_exit.length_table import LARGEST, LengthTable
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.live_gate import LiveGate


class RoundInputs(NamedTuple):
    """What a draft step reads of each row and writes for the step after. The first four are vLLM's input buffers; a row
    of sequence length 0 does no work.
    sample_positions: int64. idx_mapping, requests: int64, row -> request, -1 for a row that does not draft; the first
    is closed with the gate. draft_tokens: int64 [rows, k], 0 where nothing was drafted. row_steps: int32, most drafts
    this round. row_limits: float32, what the gate compares with, NaN for its own threshold. left_out: int32, tokens of
    context that the row's drafts do not attend to."""

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
    """The scalars of a round, and the counters (int64; worth.py). limit: most drafts a round; round_limit: the most of
    any row this round. active, going: rows in this step, and rows that go on after it."""

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
    """What limits each draft. cells: int32 [cells, 3], requests, context and length of each entry of the table of
    lengths, in its order. own_lengths, own_limits: int32 and float32 [requests], what each request asked for (LARGEST
    and NaN: nothing). ends, stops: int32 [requests], `round_setup.Ending` of each."""

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
    and copied. room: int32 [rows], most tokens of the draft of each; 0 where the match is not followed (any more)."""

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
    """What the loop's end is decided by. first, counts, fresh: float32 [2, BINS], tokens that stood and that were
    judged: the first guess, all, and those of the round before. rates: float32 [BINS], estimated acceptance by
    confidence. stands: float32 [rows], the probability that a row's draft and its next token stand. step_value: float32
    [1], tokens that a step has to bring."""

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


COUNTED = ("rounds", "steps", "drafted", "gate_ended", "nan_logits", "free_drafted", "free_accepted")
"""The first of `Progress.counts`, in the kernels' order."""
EVERY = 0.5
"""Seconds between two copies. One is a single small transfer in the stream of the work that counts."""
SOON = 0.05
"""Seconds between two copies of the counters to the host where the rule that chooses draft lengths learns from them."""


class LateCopy:
    """A tensor's values as they were a moment ago, on the host, without the host ever waiting for the device."""

    def __init__(self, source: Tensor, every: float = EVERY) -> None:
        self._source, self._every = source, every
        on_gpu = source.is_cuda
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        self._under_way, self._next = False, -float("inf")

    def read(self) -> list[int] | None:
        """The values of a copy that has arrived since the last call, None if none has; begins the next one."""
        values = None
        if self._under_way and (self._done is None or self._done.query()):
            values, self._under_way = self._host.tolist(), False
        now = time.monotonic()
        if not self._under_way and now >= self._next:
            with torch.inference_mode():  # the first read may come from inside of it and others from outside
                self._host.copy_(self._source, non_blocking=True)
            if self._done is not None:
                self._done.record()
            self._under_way, self._next = True, now + self._every
        return values


class DraftState:
    """Persistent tensors of the draft loop, in the groups that kernels take.
    lengths: int32 [requests], tokens proposed in the last round. statistics: float32 [requests, k, features], with what
    a cumulative gate reads of the step before; features: their names. matches: read where `free` is not None, but
    `matches.drafted`, tokens of the model's own in the last draft, counts everywhere. worth: read where `measures`.
    arrivals: int32 [requests, 5], of new requests (round_setup.py). step_value, step_cost: see `rule.Choice`."""

    def __init__(
        self,
        buffers: vllm.InputBuffers,
        idx_mapping: Tensor,
        sample_positions: Tensor,
        draft_tokens: Tensor,
        step: Tensor,
        max_model_len: int,
        table: LengthTable | None = None,
        free: Free | None = None,
        text: Tensor | None = None,
        measures: bool = False,
    ) -> None:
        """Around tensors that vLLM's speculator owns already; all others start at zero, the gate open.
        table: limits by load; None: k for all. free: None without free drafts; text: the tokens of all requests, for
        these. measures: whether the value of a step ends a round."""
        rows, k = draft_tokens.shape
        device, self.features = draft_tokens.device, device_features()

        def filled(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self._histograms = {"length_histogram": k + 1, "position_histogram": k, JUDGED: k, STOOD: k}
        self._before_active = len(COUNTED) + sum(self._histograms.values())
        self.buffers = buffers
        self.draft_tokens = draft_tokens
        self.left_out = filled(rows)
        self.inputs = RoundInputs(
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            seq_lens=buffers.seq_lens,
            query_start_loc=buffers.query_start_loc,
            sample_positions=sample_positions,
            idx_mapping=idx_mapping,
            requests=filled(rows, value=-1, dtype=torch.int64),
            draft_tokens=draft_tokens,
            row_steps=filled(rows),
            row_limits=filled(rows, value=math.nan, dtype=torch.float32),
            left_out=self.left_out,
        )
        self.progress = Progress(
            step=step,
            limit=filled(1, value=k if free is None else free.k),
            round_limit=filled(1),
            active=filled(1),
            going=filled(1),
            counts=filled(self._before_active + rows + 1, dtype=torch.int64),
        )
        self.gate = GateRule(feature=filled(1, value=-1), rule=filled(2, dtype=torch.float32))
        self.limits = Limits(
            cells=torch.tensor(_cells(table or LengthTable.fixed(k)), dtype=torch.int32, device=device),
            own_lengths=filled(rows, value=LARGEST),
            own_limits=filled(rows, value=math.nan, dtype=torch.float32),
            ends=filled(rows, value=LARGEST),
            stops=filled(rows, value=-1),
        )
        self.arrivals = filled(rows, 5)
        self.lengths = filled(rows)
        self.statistics = filled(rows, k, len(self.features), dtype=torch.float32)
        self.matches = Matches.of(rows, text if free is not None else None, device)
        self.worth = Worth.of(rows, device)
        self.max_model_len = max_model_len
        self.free = free
        self.measures = measures
        self.step_value, self.step_cost = 0.0, 1.0
        self._copy: LateCopy | None = None

    def staged(self, values: Sequence[tuple[int, ...]]) -> Tensor:
        """Numbers of the host, int32, where a copy to the device begins without waiting for it."""
        return torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=self.arrivals.is_cuda)

    def set_table(self, table: LengthTable) -> None:
        """Another table from the next round on: no graph holds the old one's place."""
        cells = self.staged(_cells(table)).to(self.arrivals.device, non_blocking=True)
        self.limits = self.limits._replace(cells=cells)

    def forget(self) -> None:
        """No row drafts until the next round begins, and steps are counted from 0 again."""
        self.inputs.idx_mapping.fill_(-1)
        self.inputs.requests.fill_(-1)
        for scalar in (self.progress.step, self.progress.active, self.progress.going):
            scalar.zero_()

    def snapshot(self) -> Snapshot:
        """The counters since the engine started. Waits for the device."""
        values = self.progress.counts.tolist()
        return self._named(values) | {"active_histogram": values[self._before_active :]}

    def landed(self) -> Snapshot | None:
        """What goes to a server's metrics, a moment old and without waiting for the device; None if nothing is new."""
        if self._copy is None:
            counts = self.progress.counts[: self._before_active]
            self._copy = LateCopy(counts, SOON if self.measures else EVERY)
        values = self._copy.read()
        return None if values is None else self._named(values)

    @property
    def judged_counts(self) -> Tensor:
        """Of the counters, int64 [2 k]: by position, drafts that were judged, and those that stood."""
        k = self.draft_tokens.shape[1]
        return self.progress.counts[self._before_active - 2 * k : self._before_active]

    def _named(self, values: list[int]) -> Snapshot:
        found: Snapshot = dict(zip(COUNTED, values, strict=False))
        begin = len(COUNTED)
        for name, length in self._histograms.items():
            found[name] = values[begin : begin + length]
            begin += length
        return found


def _cells(table: LengthTable) -> list[tuple[int, int, int]]:
    return [(cell.requests, cell.context, cell.k) for cell in table.cells]


class DeviceGate(LiveGate):
    """A `LiveGate` whose rule lies in device memory, where a captured draft loop reads it at every step."""

    def __init__(self, state: DraftState, kind: str, threshold: float | None) -> None:
        self._state = state
        super().__init__(kind, threshold)

    def set(self, kind: str, threshold: float | None) -> None:
        """As `LiveGate.set`; takes effect in the next round, and needs no recapture."""
        require_device(GATES[kind].rule(check_threshold(kind, threshold)))  # before anything has changed
        super().set(kind, threshold)
        rule = self.rule
        sign, limit = 1.0 if rule.direction == "at_least" else -1.0, self.limit(None)
        self._state.gate.feature.fill_(-1 if rule.feature is None else self._state.features.index(rule.feature))
        self._state.gate.rule.copy_(torch.tensor([sign, limit]))


@dataclass
class DeviceRecorder:
    """Collects the record of `DraftRecorder` from drafts that stay on the device, without waiting for them.
    Each round is a handful of small copies; they are read when the record is."""

    features: tuple[str, ...] = field(default_factory=device_features)
    _rounds: list[tuple[list[str], Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def verdict(self, batch: vllm.InputBatch, num_sampled: Tensor, state: DraftState) -> None:
        """The verify pass is over, and the state still describes the drafts that it looked at."""
        if batch.num_draft_tokens_per_req is None:
            return  # a step without drafts
        places, requests = batch.cu_num_logits.diff() - 1, batch.idx_mapping
        self._rounds.append(
            (
                list(batch.req_ids),
                places,
                num_sampled.clone(),
                state.matches.drafted[requests],
                state.statistics[requests],
            )
        )

    def plain(self) -> dict[str, list[Any]]:
        """The log so far in the form of `DraftRecorder.plain`. Waits for the device."""
        log: dict[str, list[Any]] = {"statistics": [], "drafted": [], "accepted": [], "request": []}
        log["features"] = list(self.features)
        numbers: dict[str, int] = {}
        for names, verified, sampled, lengths, statistics in self._rounds:
            seen = torch.minimum(verified, lengths).tolist()
            for row, (name, gained) in enumerate(zip(names, sampled.tolist(), strict=False)):
                if seen[row] > 0 and gained > 0:
                    log["statistics"].append(statistics[row, : seen[row]].tolist())
                    log["drafted"].append(int(seen[row]))
                    log["accepted"].append(min(gained - 1, int(seen[row])))
                    log["request"].append(numbers.setdefault(name, len(numbers)))
        return log
