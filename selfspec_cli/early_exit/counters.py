"""What drafting did, counted where it happens, and what the counts say. Plain integers, free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Any

Snapshot = dict[str, Any]
"""Totals since the engine started: `TOTALS` as numbers, `HISTOGRAMS` as lists of counts by value from 0."""

TOTALS = ("rounds", "steps", "drafted", "gate_ended", "nan_logits", "free_drafted", "free_accepted", "seconds")
HISTOGRAMS = ("length_histogram", "active_histogram", "position_histogram")
JUDGED, STOOD = "judged_at", "stood_at"
"""Of a snapshot of the V2 draft loop, by position: drafts verified when all before them stood, and those that did."""
REASONS = ("load", "context", "request", "cost")
"""Why a request is not drafted for: the table by load, or by context, its own wish, or drafts do not pay."""

INVARIANTS = {
    "host_synchronisations": "times that the host waited for the device inside `propose`",
    "allocations": "tensors allocated on the device inside `propose`",
    "host_copies": "values copied from the device to the host inside `propose`",
    "eager_steps": "decoding and draft steps that ran neither compiled nor in a CUDA graph",
    "unrolled_rounds": "rounds whose draft loop could not end on the device",
    "sampled_rows": "requests that were not greedy",
    "finished_rows": "requests that were drafted for after their last token",
    "closed_rows": "requests that took part in a draft step after their gate had closed",
}
"""What must not happen while a model drafts, whatever its speed, and what is counted of it on a live engine
(`vllm_plugin/observe/watch.py`). A performance check asks for 0 of it."""


@dataclass(frozen=True)
class VerifyCounts:
    """Speculative decoding as vLLM counts it, over one stretch of work.
    rounds: verify steps that had drafts, one a request. places: tokens that verify passes looked at: on CUDA k of each
    request, because vLLM plans a pass before the drafts exist; elsewhere the drafted tokens but for those that a
    request's last round no longer needed. accepted: tokens; accepted_at: by draft position 1..k."""

    rounds: int
    places: int
    accepted: int
    accepted_at: list[int]

    def since(self, before: VerifyCounts) -> VerifyCounts:
        return self._plus(before, -1)

    @staticmethod
    def total(parts: Iterable[VerifyCounts | None]) -> VerifyCounts | None:
        """Several stretches together; None where none of them drafted."""
        counted = [part for part in parts if part is not None]
        return reduce(VerifyCounts._plus, counted) if counted else None

    def _plus(self, other: VerifyCounts, sign: int = 1) -> VerifyCounts:
        return VerifyCounts(
            self.rounds + sign * other.rounds,
            self.places + sign * other.places,
            self.accepted + sign * other.accepted,
            [count + sign * more for count, more in zip(self.accepted_at, other.accepted_at, strict=True)],
        )


@dataclass
class DraftCounters:
    """Counters of one draft loop. A round drafts for a whole batch; it has as many steps as its longest draft."""

    k: int
    rounds: int = 0  # rounds in which anything was drafted
    steps: int = 0  # forward passes of the trunk
    drafted: int = 0  # tokens of the model's own drafts: active requests summed over steps
    gate_ended: int = 0  # rounds that the gate, or free drafts, ended before k
    nan_logits: int = 0  # drafted tokens whose logits were no numbers
    free_drafted: int = 0  # tokens copied from what a request had before
    free_accepted: int = 0  # of these
    seconds: float = 0.0  # host time inside the draft loop
    length_histogram: list[int] = field(default_factory=list)  # rounds by number of steps taken, index 0..k
    active_histogram: list[int] = field(default_factory=list)  # steps by number of requests taking part, from 0
    position_histogram: list[int] = field(default_factory=list)  # tokens drafted at each position of a draft, 0..k-1
    off: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # rounds of a request, by reason
    in_force: int = 0  # the most tokens that any request might draft in the last round

    def __post_init__(self) -> None:
        self.length_histogram = [0] * (self.k + 1)
        self.position_histogram = [0] * self.k
        self._taken: int | None = None  # steps of the round in hand

    def allowed(self, limit: int, requests: Sequence[tuple[int, str | None]]) -> None:
        """A round begins in which each request may draft this many tokens, or none for a reason. limit: for all."""
        self.in_force = min(limit, max((k for k, _ in requests), default=limit))
        for _, reason in requests:
            if reason is not None:
                self.off[reason] += 1

    def round(self, requests: int) -> None:
        """A round that drafts begins with this number of requests."""
        self._close()
        self.rounds, self._taken = self.rounds + 1, 0
        self.active_histogram += [0] * (requests + 1 - len(self.active_histogram))

    def step(self, requests: int) -> None:
        """One forward pass of the trunk over this number of requests."""
        assert self._taken is not None
        self.steps += 1
        self.drafted += requests
        self.active_histogram[requests] += 1
        self.position_histogram[self._taken] += requests
        self._taken += 1

    def ended_early(self) -> None:
        """Every request's gate closed before the last step."""
        self.gate_ended += 1

    def snapshot(self) -> Snapshot:
        """The counters since the engine started, as plain values."""
        self._close()
        totals = {name: getattr(self, name) for name in TOTALS}
        return totals | {name: list(getattr(self, name)) for name in HISTOGRAMS}

    def landed(self) -> Snapshot:
        """What goes to a server's metrics: the counters, and what only the host knows here."""
        return self.snapshot() | {"off": dict(self.off), "in_force": self.in_force}

    def _close(self) -> None:
        if self._taken is not None:
            self.length_histogram[self._taken] += 1
            self._taken = None


def since(after: Snapshot | None, before: Snapshot | None) -> Snapshot | None:
    """What happened between two snapshots; None for an engine that does not draft."""
    return None if after is None or before is None else _plus(after, before, -1)


def total(snapshots: Iterable[Snapshot | None]) -> Snapshot | None:
    """Several stretches together; None where none of them drafted."""
    known = [snapshot for snapshot in snapshots if snapshot is not None]
    return reduce(_plus, known) if known else None


def summary(counts: Snapshot, rounds: int, drafted: int, accepted: int) -> dict[str, Any]:
    """What a row says of drafting; None where nothing was counted. counts: the draft loop's own, over one stretch.
    rounds, drafted, accepted: vLLM's, over the same stretch, each round one request's."""
    active = [(number, count) for number, count in enumerate(counts.get("active_histogram", [])) if count]
    return {
        "rounds": counts["rounds"],
        "draft_steps": counts["steps"],
        "draft_steps_histogram": counts["length_histogram"],
        "mean_draft_steps": _share(counts["steps"], counts["rounds"]),
        "ended_by_gate": _share(counts["gate_ended"], counts["rounds"]),
        "active_requests_mean": _share(counts["drafted"], counts["steps"]),
        "active_requests_min": active[0][0] if active else None,
        "active_requests_max": active[-1][0] if active else None,
        # One active request in one step drafts one token, so acceptance a token is acceptance an active request.
        "acceptance_per_active_request": _share(accepted, drafted),
        "accepted_per_request_and_round": _share(accepted, rounds),
        "nan_logits": counts.get("nan_logits", 0),
        "draft_seconds": counts.get("seconds"),
    }


def made(counts: Snapshot) -> int:
    """Tokens drafted, copied ones included; snapshots of old results have none of these."""
    return int(counts["drafted"] + counts.get("free_drafted", 0))


def _plus(one: Snapshot, other: Snapshot, sign: int = 1) -> Snapshot:
    combined: Snapshot = {}
    for name, value in one.items():
        if isinstance(value, list):
            pairs = zip_longest(value, other[name], fillvalue=0)
            combined[name] = [count + sign * more for count, more in pairs]
        else:
            combined[name] = value + sign * other[name]
    return combined


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
