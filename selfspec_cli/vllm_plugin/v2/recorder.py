"""The record of drafts that stay on the device (early_exit/draft_log.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.gates import device_features
from selfspec_cli.vllm_plugin import vllm_names as vllm

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState


@dataclass
class DeviceRecorder:
    """Collects the record of `DraftRecorder` from drafts that stay on the device, without waiting for them.

    Each round is a handful of small copies; they are read when the record is.
    """

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
