"""Everything that the V2 draft loop keeps on the device, and the gate that can change there without a recapture."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec_cli.early_exit.counters import JUDGED, STOOD, Snapshot
from selfspec_cli.early_exit.gates import Rule, device_features, require_device
from selfspec_cli.early_exit.length_table import LARGEST, LengthTable
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.live_gate import LiveGate
from selfspec_cli.vllm_plugin.v2.tensors import Free, GateRule, Limits, Matches, Progress, RoundInputs, Worth

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
    """Persistent tensors of the draft loop, in the groups that kernels take (tensors.py).

    lengths: int32 [requests], tokens proposed in the last round. statistics: float32 [requests, k, features], with what
    a cumulative gate reads of the step before. matches: read where `free` is not None; but `matches.drafted`, tokens of
    the model's own in the last draft, counts everywhere. worth: read where `measures`. arrivals: int32 [requests, 5],
    of new requests (round_setup.py). features: names of the statistics. step_value, step_cost: of the round in hand, as
    `rule.Choice` has them.
    """

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
        these. measures: whether the value of a step ends a round.
        """
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
        super().set(kind, threshold)
        rule = self.rule
        sign, limit = 1.0 if rule.direction == "at_least" else -1.0, self.limit(None)
        self._state.gate.feature.fill_(-1 if rule.feature is None else self._state.features.index(rule.feature))
        self._state.gate.rule.copy_(torch.tensor([sign, limit]))

    def _accept(self, rule: Rule) -> None:
        require_device(rule)
