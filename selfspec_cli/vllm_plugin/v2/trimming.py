"""From how many running requests on vLLM's adaptive verification trims the verify pass; below, that costs more than it
saves. And what vLLM's choice of drafts rests on: how likely drafts are to be accepted, what a draft loop costs, and
which drafts were verified.

vLLM decides when an engine starts whether verify passes are trimmed at all, because their graphs are others. Within
such an engine a step may verify every draft: its budget is then all of them, and nothing has to be ranked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.v2.verdict import verified_places

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from selfspec_cli.vllm_plugin.v2.state import DraftState
    from selfspec_cli.vllm_plugin.v2.step_order import DraftClock

FROM, CLOCK = "early_exit_trims_from", "early_exit_draft_clock"
"""Attributes of an engine's `RequestState`, which its speculator is made with and its manager of adaptive verification
knows: running requests from which on drafts are left out, and a `DraftClock`."""
UNKNOWN = 1.0
"""The confidence that vLLM begins a request with."""


def acceptance_estimator(requests: int, k: int, device: torch.device) -> OnlineAcceptanceEstimator:
    """vLLM's estimator, for so many slots of requests and k drafts a round: a logistic function of the log odds of a
    distribution's greatest probability, fitted while the engine serves. It begins with that probability itself."""
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    made = OnlineAcceptanceEstimator(requests, k, device)
    made.slope.fill_(1.0)
    made.intercepts.zero_()
    return made


def rejected_drafts(num_sampled: Tensor, num_rejected: Tensor, drafted: Tensor) -> Tensor:
    """Of the places that a verify pass rejected, those that held a draft, int32 [rows].

    num_sampled, num_rejected: int32 [rows] tokens that a request gained, and places without one. drafted: int32 [rows].
    """
    accepted = (num_sampled - 1).clamp(min=0)
    return num_rejected.minimum((drafted - accepted).clamp(min=0))


def trim_from(requests: Any, count: int) -> None:
    """From now on, the engine of `requests` trims verify passes of so many requests and more."""
    setattr(requests, FROM, count)


def price_drafts_by(requests: Any, clock: DraftClock) -> None:
    """From now on, a draft loop costs what it took lately. Not for several ranks, which have to trim alike."""
    setattr(requests, CLOCK, clock)


def judge_verified_drafts(state: DraftState, batch: InputBatch) -> None:
    """Let a draft that was left out of the verify pass not count as rejected, where lengths go by acceptance."""
    places = verified_places(batch) if len(state.budget.ladder) else None
    if places is not None:
        requests = batch.idx_mapping
        state.lengths[requests] = torch.minimum(state.lengths[requests], places.to(state.lengths.dtype))


def forget_confidences(state: DraftState) -> None:
    """Steps without drafts begin: what is drafted after them is verified, as that of new requests is."""
    state.confidences.fill_(UNKNOWN)


def trim_under_load(original: Callable[..., int]) -> Callable[..., int]:
    """Replacement for `AdaptiveVerificationManager.get_num_tokens`: below that load nothing is ranked or left out."""

    @functools.wraps(original)
    def get_num_tokens(
        self: Any, num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]]
    ) -> int:
        drafts = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
        total = sum(drafts.values())
        fits = total + len(drafts) * self.num_bonus_tokens <= self._max_total_logits
        if len(drafts) >= getattr(self.req_states, FROM, 1) or not fits:
            # In the steps that vLLM timed for this, no draft was made.
            clock = getattr(self.req_states, CLOCK, None)
            if clock is not None and (seconds := clock.seconds()) is not None:
                self.cost_tables[0].fill(1000 * seconds)  # milliseconds, for any number of requests
            return original(self, num_tokens_per_req, draft_tokens)
        others = {name: tokens - drafts[name] for name, tokens in num_tokens_per_req.items()}
        self._batch_budget = (drafts, others, total)
        return sum(num_tokens_per_req.values())

    return get_num_tokens


def remember_under_load(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement for `AdaptiveVerificationManager.record_confidences`: below that load nobody waits for a copy.

    Requests that came meanwhile begin with the confidence of new ones, as they would have.
    """

    @functools.wraps(original)
    def record_confidences(self: Any, confidence_probs: Any, input_batch: Any) -> None:
        if input_batch.num_reqs >= getattr(self.req_states, FROM, 1):
            return original(self, confidence_probs, input_batch)
        other = self._stale_idx ^ 1
        if self._pending_resets and self._copy_events[other].query():
            self._stale_confidences[other].np[self._pending_resets] = 1.0
            self._pending_resets.clear()

    return record_confidences
