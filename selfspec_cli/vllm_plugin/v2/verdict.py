"""Drafts that stopped early, as vLLM's V2 verifier sees them, and their record.

The V2 scheduler plans a step before the drafts of the last one exist, so every request is verified at k places. Places
beyond what a request drafted hold token 0, which the model can embed; the rejection sampler gets these as
invalid drafts, as vLLM marks drafts that a grammar forbids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.gates import device_features
from selfspec_cli.vllm_plugin.subclasses import copied_as, overriding
from selfspec_cli.vllm_plugin.v2.chosen_tokens import with_chosen_tokens

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState
    from selfspec_cli.vllm_plugin.vllm_names import InputBatch, RejectionSampler, RequestState

LENGTHS = "early_exit_lengths"
"""Attribute of an engine's `RequestState`, which its speculator is made with and its sampler knows: int32 [requests],
tokens that each request drafted in the last round. Another engine in the same process has a `RequestState` of its own.
"""


def verify_no_more_than(requests: RequestState, lengths: Tensor) -> None:
    """From now on, the engine of `requests` verifies at most so many drafted tokens of each request."""
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


def verified_places(batch: InputBatch) -> Tensor | None:
    """Drafts of each request in the verify pass of a step, integers [rows]; None for a step without any."""
    return None if batch.num_draft_tokens_per_req is None else batch.cu_num_logits.diff() - 1


@dataclass
class DeviceRecorder:
    """Collects the record of `DraftRecorder` from drafts that stay on the device, without waiting for them.

    Each round is a handful of small copies; they are read when the record is.
    """

    features: tuple[str, ...] = field(default_factory=device_features)
    _rounds: list[tuple[list[str], Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def verdict(self, batch: InputBatch, num_sampled: Tensor, state: DraftState) -> None:
        """The verify pass is over, and the state still describes the drafts that it looked at."""
        places = verified_places(batch)
        if places is None:
            return
        requests = batch.idx_mapping
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
