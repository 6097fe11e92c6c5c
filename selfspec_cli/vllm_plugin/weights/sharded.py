"""A projection to logits whose rows are split over tensor-parallel ranks, as the model's own lm_head is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.vllm_names import (
    LogitsProcessor,
    ParallelLMHead,
    set_current_vllm_config,
    tensor_model_parallel_all_gather,
)

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig
    from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight


class ShardedProjection:
    """x [n, hidden] -> logits [n, count] by this rank's rows, and those of the others.

    rows: vLLM's ParallelLMHead (or one on copies: `copied.copied`). bias: [count] or None, kept whole. Every rank must
    call `logits` together, and each gets all of them.
    """

    def __init__(self, rows: Any, count: int, bias: Tensor | None, vllm_config: VllmConfig) -> None:
        with set_current_vllm_config(vllm_config):
            self._gather = LogitsProcessor(count)
        self._rows = rows
        self.bias = bias

    @property
    def tensors(self) -> list[Tensor]:
        """What a call reads on this rank, apart from the bias."""
        if self.copied is not None:
            return self.copied[0].read_by_a_step()
        return [parameter.detach() for parameter in self._rows.parameters()]

    @property
    def copied(self) -> tuple[CopiedWeight, None] | None:
        """This rank's copy, whose product adds no bias; None where the rows are no copy."""
        copy = getattr(self._rows, "copy_of_weight", None)
        return None if copy is None else (copy, None)

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, count]."""
        logits = self._gather(self._rows, x)
        return logits if self.bias is None else logits + self.bias


def split(weight: Tensor, vllm_config: VllmConfig) -> ParallelLMHead:
    """This rank's share of `weight` [rows, hidden], which is the same on every rank."""
    rows, hidden = weight.shape
    with set_current_vllm_config(vllm_config), torch.device(weight.device):
        share = ParallelLMHead(rows, hidden, params_dtype=weight.dtype)
    share.weight_loader(share.weight, weight)
    share.quant_method.process_weights_after_loading(share)
    return share


def gathered(shard: Tensor, rows: int) -> Tensor:
    """All rows of a weight that is split over ranks by rows, [rows, hidden], on every rank.

    shard: this rank's rows, padded to the same number on every rank; padding is at the end of the whole.
    """
    return tensor_model_parallel_all_gather(shard.contiguous(), dim=0)[:rows]
