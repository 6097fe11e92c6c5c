"""Everything that the V2 draft loop keeps on the device, and the gate that can change there without a recapture."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec_cli.early_exit.counters import JUDGED, STOOD, Snapshot
from selfspec_cli.early_exit.gates import Rule, device_features, require_device
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.vllm_plugin.live_gate import LiveGate
from selfspec_cli.vllm_plugin.v2.draft_budget import DraftBudget
from selfspec_cli.vllm_plugin.v2.tensors import Free, GateRule, Matches, Progress, RoundInputs, Worth

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import InputBuffers

COUNTED = ("rounds", "steps", "drafted", "gate_ended", "nan_logits", "free_drafted", "free_accepted")
"""The first of `DraftState.counts`, in the kernels' order."""
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
    """Persistent tensors of the draft loop. A row is a place in the batch; a request is vLLM's slot for one.

    Rows: buffers (tokens, positions, sequence lengths; 0 is a row that does no work), idx_mapping and requests (int64,
    row -> request, -1 for a row that does not draft; the first is closed with the gate), sample_positions (int64),
    draft_tokens (int64 [rows, k], 0 where nothing was drafted), row_steps (int32, most drafts of each this round),
    row_limits (float32, what the gate compares with in each, NaN for the gate's own), left_out (int32, tokens of the
    context that the row's drafts do not attend to).
    Requests: lengths (int32, tokens proposed in the last round), statistics (float32 [requests, k, features]; what a
    cumulative gate reads of the step before is there too).
    budget: what decides how much a request may draft. matches: what the histories of requests say, read where `free` is
    not None; but `matches.drafted`, tokens of the model's own in the last draft, counts everywhere.
    Scalars: step, limit (most drafts a round), round_limit (the most of any row this round), active and going (rows in
    this step, rows that go on after it), gate_feature (-1: always open), gate_rule (sign and threshold). counts: int64.
    features: names of the statistics. worth: whether another step is worth its time, read where `measures`. step_value,
    step_cost: of the round in hand, as `rule.Choice` has them.
    """

    def __init__(
        self,
        buffers: InputBuffers,
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
        these. measures: whether the value of a step ends a round.
        """
        rows, k = draft_tokens.shape
        device, features = draft_tokens.device, device_features()

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffers = buffers
        self.idx_mapping = idx_mapping
        self.requests = zeros(rows, dtype=torch.int64).fill_(-1)
        self.sample_positions = sample_positions
        self.draft_tokens = draft_tokens
        self.lengths = zeros(rows)
        self.statistics = zeros(rows, k, len(features), dtype=torch.float32)
        self.row_steps = zeros(rows)
        self.row_limits = zeros(rows, dtype=torch.float32).fill_(math.nan)
        self.left_out = zeros(rows)
        self.step = step
        self.limit = zeros(1).fill_(k if free is None else free.k)
        self.round_limit = zeros(1)
        self.active = zeros(1)
        self.going = zeros(1)
        self.gate_feature = zeros(1).fill_(-1)
        self.gate_rule = zeros(2, dtype=torch.float32)
        self.counts = zeros(len(COUNTED) + k + 1 + k + 2 * k + rows + 1, dtype=torch.int64)
        self.max_model_len = max_model_len
        self.features = features
        self.budget = DraftBudget.of(table or LengthTable.fixed(k), rows, device)
        self.matches = Matches.of(rows, text if free is not None else None, device)
        self.worth = Worth.of(rows, device)
        self.free = free
        self.measures = measures
        self.step_value, self.step_cost = 0.0, 1.0
        self._copy: LateCopy | None = None

    def inputs(self) -> RoundInputs:
        """The rows' tensors as kernels take them."""
        buffers = self.buffers
        return RoundInputs(
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            seq_lens=buffers.seq_lens,
            query_start_loc=buffers.query_start_loc,
            sample_positions=self.sample_positions,
            idx_mapping=self.idx_mapping,
            requests=self.requests,
            draft_tokens=self.draft_tokens,
            row_steps=self.row_steps,
            row_limits=self.row_limits,
            left_out=self.left_out,
        )

    def progress(self) -> Progress:
        """The scalars of the round and the counters as kernels take them."""
        return Progress(
            step=self.step,
            limit=self.limit,
            round_limit=self.round_limit,
            active=self.active,
            going=self.going,
            counts=self.counts,
        )

    def gate(self) -> GateRule:
        """The gate in force as kernels take it."""
        return GateRule(feature=self.gate_feature, rule=self.gate_rule)

    def forget(self) -> None:
        """No row drafts until the next round begins, and steps are counted from 0 again."""
        self.idx_mapping.fill_(-1)
        self.requests.fill_(-1)
        for scalar in (self.step, self.active, self.going):
            scalar.zero_()

    def snapshot(self) -> Snapshot:
        """The counters since the engine started. Waits for the device."""
        values = self.counts.tolist()
        return self._named(values) | {"active_histogram": values[self._before_active :]}

    def landed(self) -> Snapshot | None:
        """What goes to a server's metrics, a moment old and without waiting for the device; None if nothing is new."""
        if self._copy is None:
            self._copy = LateCopy(self.counts[: self._before_active], SOON if self.measures else EVERY)
        values = self._copy.read()
        return None if values is None else self._named(values)

    @property
    def judged_counts(self) -> Tensor:
        """Of `counts`, int64 [2 k]: by position, drafts that were judged, and those that stood."""
        k = self.draft_tokens.shape[1]
        return self.counts[self._before_active - 2 * k : self._before_active]

    @property
    def _before_active(self) -> int:
        return len(COUNTED) + 4 * self.draft_tokens.shape[1] + 1

    def _named(self, values: list[int]) -> Snapshot:
        k = self.draft_tokens.shape[1]
        after = len(COUNTED) + k + 1
        histograms = {"length_histogram": values[len(COUNTED) : after]}
        for number, name in enumerate(("position_histogram", JUDGED, STOOD)):
            histograms[name] = values[after + number * k : after + (number + 1) * k]
        return dict(zip(COUNTED, values, strict=False)) | histograms


class DeviceGate(LiveGate):
    """A `LiveGate` whose rule lies in device memory, where a captured draft loop reads it at every step."""

    def __init__(self, state: DraftState, kind: str, threshold: float | None) -> None:
        self._state = state
        super().__init__(kind, threshold)

    def set(self, kind: str, threshold: float | None) -> None:
        """As `LiveGate.set`; takes effect in the next round, and needs no recapture."""
        super().set(kind, threshold)
        rule = self.rule
        sign, limit = 1.0 if rule.direction == "at_least" else -1.0, self.limit(None)
        self._state.gate_feature.fill_(-1 if rule.feature is None else self._state.features.index(rule.feature))
        self._state.gate_rule.copy_(torch.tensor([sign, limit]))

    def _accept(self, rule: Rule) -> None:
        require_device(rule)
