"""Drafts that stopped early, as vLLM's V2 verifier sees them, and their record.

The V2 scheduler plans a step before the drafts of the last one exist, so every request is verified at k places. Places
beyond what a request drafted hold token 0, which the model can embed; just before the rejection sampler compares, they
become -1, which it never accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.gates import device_features

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from selfspec_cli.vllm_plugin.v2.state import DraftState

Gather = Callable[..., tuple[Tensor, Tensor]]

_lengths: Tensor | None = None  # of this worker's engine; the function that is replaced is told of no engine


def verify_no_more_than(lengths: Tensor | None) -> None:
    """lengths: int32 [requests], tokens that each request drafted in the last round; None: all that were scheduled."""
    global _lengths
    _lengths = lengths


def with_short_drafts(original: Gather) -> Gather:
    """Replacement for the rejection sampler's `gather_draft_sampled`."""

    def gather_draft_sampled(
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        prefill_len: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tokens, places = original(
            input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos, prefill_len
        )
        if _lengths is not None:
            from selfspec_cli.vllm_plugin.v2.kernels import reject_undrafted

            reject_undrafted(tokens, expanded_local_pos, expanded_idx_mapping, _lengths)
        return tokens, places

    return gather_draft_sampled


@dataclass
class DeviceRecorder:
    """Collects the record of `DraftRecorder` from drafts that stay on the device, without waiting for them.

    Each round is a handful of small copies; they are read when the record is.
    """

    features: tuple[str, ...] = field(default_factory=device_features)
    _rounds: list[tuple[list[str], Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def verdict(self, batch: InputBatch, num_sampled: Tensor, state: DraftState) -> None:
        """The verify pass is over, and the state still describes the drafts that it looked at."""
        if batch.num_draft_tokens_per_req is None:
            return
        requests = batch.idx_mapping
        self._rounds.append(
            (
                list(batch.req_ids),
                batch.cu_num_logits.diff() - 1,  # the host does not know what adaptive verification left out
                num_sampled.clone(),
                state.lengths[requests],
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
