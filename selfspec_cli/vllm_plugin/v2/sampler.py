"""Drafts that stopped early, as vLLM's V2 rejection sampler sees them.

The V2 scheduler plans a step before the drafts of the last one exist, so every request is verified at k places. Places
beyond what a request drafted hold token 0, which the model can embed; the rejection sampler gets these as invalid
drafts, as vLLM marks drafts that a grammar forbids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from selfspec_cli.vllm_plugin.overrides import copied_as, overriding
from selfspec_cli.vllm_plugin.v2.chosen_tokens import with_chosen_tokens

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import InputBatch, RejectionSampler, RequestState

LENGTHS = "early_exit_lengths"
"""Attribute of an engine's `RequestState`, which its speculator is made with and its sampler knows: int32 [requests],
tokens that each request drafted in the last round. Another engine in the same process has a `RequestState` of its own.
"""


def verify_no_more_than(requests: RequestState, lengths: Tensor) -> None:
    """From now on, the engine of `requests` verifies of each request no more tokens than it drafted."""
    setattr(requests, LENGTHS, lengths)


def with_short_draft_sampler(original: Callable[..., None]) -> Callable[..., None]:
    """Override of the V2 runner's `load_model`, which makes its samplers."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        theirs = self.rejection_sampler
        if theirs is not None:
            kind = overriding(with_short_drafts(type(theirs)), {"__call__": with_chosen_tokens})
            self.rejection_sampler = copied_as(kind, theirs)

    return load_model


def with_short_drafts(original: type[RejectionSampler]) -> type[RejectionSampler]:
    """A subclass of the V2 runner's `RejectionSampler` that rejects what was never drafted."""

    class ShortDraftSampler(original):
        def __call__(
            self,
            logits: Tensor,
            input_batch: InputBatch,
            draft_logits: Tensor | None = None,
            invalid_drafts: Tensor | None = None,
        ) -> Any:
            lengths = getattr(self.sampler.req_states, LENGTHS, None)
            if lengths is not None:
                from selfspec_cli.vllm_plugin.v2.kernels import undrafted

                never = undrafted(input_batch.expanded_local_pos, input_batch.expanded_idx_mapping, lengths)
                invalid_drafts = never if invalid_drafts is None else never | invalid_drafts
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    return ShortDraftSampler
