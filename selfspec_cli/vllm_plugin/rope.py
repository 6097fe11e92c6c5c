"""Positions of several dimensions (M-RoPE, arXiv:2409.12191), as models of pictures and text have them.

A generated token has the same position in all dimensions: its place in the text, moved by what the pictures of its
request take less or more than their tokens. So a draft step needs one number a request as well as its positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm


class DraftPositions:
    """What positions of draft steps are to the model: as they are, or moved and once for each dimension.

    shifts: int64 [most], what each request of a round is moved by; CUDA graphs read it, so it is filled in place.
    """

    def __init__(self, vllm_config: vllm.VllmConfig, most: int, device: torch.device) -> None:
        """most: tokens of a step, or of the run in which vLLM measures memory."""
        model = vllm_config.model_config
        self.several = bool(model.uses_mrope)
        self.shifts = torch.zeros(most if self.several else 0, dtype=torch.int64, device=device)
        # One place more than is used keeps rows from being contiguous, which torch.compile would specialise on.
        room = (model.mrope_num_dims, most + 1) if self.several else (0, 0)
        self._room = torch.zeros(room, dtype=torch.int64, device=device)

    def of(self, positions: Tensor) -> Tensor:
        """int64 [n] -> what the model takes: the same, or [dimensions, n]. A row that does not draft stays at 0."""
        if not self.several:
            return positions
        moved = self._room[:, : len(positions)]
        return moved.copy_(positions).add_(self.shifts[: len(positions)]).clamp_min_(0)
