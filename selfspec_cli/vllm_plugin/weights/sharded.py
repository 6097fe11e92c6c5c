"""A projection to logits whose rows are split over tensor-parallel ranks, as the model's own lm_head is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ShardedProjection:
    """x [n, hidden] -> logits [n, rows]: vLLM's ParallelLMHead and LogitsProcessor over rows of our own.

    weight: [rows, hidden], the same on every rank; each keeps its share. bias: [rows] or None, kept whole. Every rank
    must call `logits` together, and each gets all of them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, vllm_config: VllmConfig) -> None:
        rows, hidden = weight.shape
        with set_current_vllm_config(vllm_config), torch.device(weight.device):
            self._rows = ParallelLMHead(rows, hidden, params_dtype=weight.dtype)
            self._gather = LogitsProcessor(rows)
        self._rows.weight_loader(self._rows.weight, weight)
        self._rows.quant_method.process_weights_after_loading(self._rows)
        self.bias = bias
        self.weight: Tensor = self._rows.weight.detach()  # [rows of this rank, hidden]

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, rows]."""
        logits = self._gather(self._rows, x)
        return logits if self.bias is None else logits + self.bias


def gathered(shard: Tensor, rows: int) -> Tensor:
    """All rows of a weight that is split over ranks by rows, [rows, hidden], on every rank.

    shard: this rank's rows, padded to the same number on every rank; padding is at the end of the whole.
    """
    return tensor_model_parallel_all_gather(shard.contiguous(), dim=0)[:rows]
