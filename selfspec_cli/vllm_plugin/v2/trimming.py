"""From how many running requests on vLLM's adaptive verification trims the verify pass; below, that costs more than it
saves.

vLLM decides when an engine starts whether verify passes are trimmed at all, because their graphs are others. Within
such an engine a step may verify every draft: its budget is then all of them, and nothing has to be ranked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FROM = "early_exit_trims_from"
"""Attribute of an engine's `RequestState`, which its speculator is made with and its manager of adaptive verification
knows: running requests from which on drafts are left out."""


def trim_from(requests: Any, count: int) -> None:
    """From now on, the engine of `requests` trims verify passes of so many requests and more."""
    setattr(requests, FROM, count)


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
