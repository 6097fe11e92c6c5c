"""Log-probabilities of chosen tokens (`logprob_token_ids`) in steps with drafts, on vLLM 0.32's V2 model runner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    from selfspec_cli.vllm_plugin.vllm_names import InputBatch, LogprobsTensors


def with_chosen_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Override of the V2 rejection sampler's `__call__`: a request gets the log-probabilities of the tokens that it
    chose also where drafts are verified. vLLM gives it the likeliest tokens there, or none."""

    def __call__(self: Any, logits: Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        """logits: [drafts + requests, vocabulary]."""
        most = self.sampler.logprob_token_ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        if most:
            self = copy.copy(self)
            self._get_logprobs_tensors = _Gathering(self.sampler, input_batch.expanded_idx_mapping, most)
        return original(self, logits, input_batch, *args, **kwargs)

    return __call__


class _Gathering:
    """Takes the place of `RejectionSampler._get_logprobs_tensors` in one step.

    requests: slot of each row of logits. most: chosen tokens of the request that chose most.
    """

    def __init__(self, sampler: Any, requests: Tensor, most: int) -> None:
        self.sampler, self.requests, self.most = sampler, requests, most
        self.reached = 0  # rows of the chunks before

    def __call__(
        self,
        sampled: Tensor,
        num_sampled: Tensor,
        logits: Tensor,
        cu_num_logits: Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors:
        """Of a chunk. sampled: [requests, places]; num_sampled: [requests]; logits: [rows, vocabulary];
        cu_num_logits: [requests + 1], where the rows of each begin; max_num_logprobs: negative where none are asked."""
        from selfspec_cli.vllm_plugin.vllm_names import compute_topk_scores

        rows = self.requests[self.reached : self.reached + len(logits)]
        self.reached += len(logits)
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            one_a_row(sampled, num_sampled, cu_num_logits, len(logits)),
            cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=rows,
            max_per_req_token_ids=self.most,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def one_a_row(sampled: Tensor, counts: Tensor, begins: Tensor, rows: int) -> Tensor:
    """Sampled tokens [rows], in the rows of the logits that they were sampled from, and 0 in others.

    sampled: [requests, places], of which each has `counts` [requests]; begins: [requests + 1], first row of each.
    """
    places = torch.arange(sampled.shape[1], device=sampled.device)
    taken = places < counts.unsqueeze(1)
    where = torch.where(taken, begins[:-1].unsqueeze(1) + places, rows)  # those not sampled go behind the last row
    found = sampled.new_zeros(rows + 1)
    return found.scatter_(0, where.flatten().long(), sampled.flatten())[:rows]
