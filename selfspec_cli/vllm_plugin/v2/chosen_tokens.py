"""Log-probabilities of chosen tokens (`logprob_token_ids`) in steps with drafts, on vLLM 0.32's V2 model runner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import InputBatch


def with_chosen_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Override of the V2 rejection sampler's `__call__`: a request gets the log-probabilities of the tokens that it
    chose also where drafts are verified. vLLM gives it the likeliest tokens there, or none."""

    def __call__(self: Any, logits: Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        """logits: [drafts + requests, vocabulary]."""
        sampler, requests = self.sampler, input_batch.idx_mapping_np
        most = sampler.logprob_token_ids_state.max_num_token_ids(requests)
        if not most:
            return original(self, logits, input_batch, *args, **kwargs)
        from selfspec_cli.vllm_plugin.vllm_names import compute_topk_scores

        processed: list[Tensor] = []
        if sampler.logprobs_mode.startswith("processed"):
            self = copy.copy(self)
            self.sampler = _keeping(sampler, processed)
        output = original(self, logits, input_batch, *args, **kwargs)
        output.logprobs_tensors = compute_topk_scores(
            torch.cat(processed) if processed else logits,
            max(sampler.sampling_states.max_num_logprobs(requests), 0),  # negative where none are asked
            one_a_row(output.sampled_token_ids, output.num_sampled, input_batch.cu_num_logits, len(logits)),
            input_batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            max_per_req_token_ids=most,
            logits_mode=sampler.logprobs_mode.endswith("logits"),
        )
        return output

    return __call__


def _keeping(sampler: Any, processed: list[Tensor]) -> Any:
    """A copy of vLLM's sampler that keeps what its logits processors made of each part of a batch."""

    def apply_sampling_params(*args: Any, **kwargs: Any) -> Tensor:
        processed.append(sampler.apply_sampling_params(*args, **kwargs))
        return processed[-1]

    kept = copy.copy(sampler)
    kept.apply_sampling_params = apply_sampling_params
    return kept


def one_a_row(sampled: Tensor, counts: Tensor, begins: Tensor, rows: int) -> Tensor:
    """Sampled tokens [rows], in the rows of the logits that they were sampled from, and 0 in others.

    sampled: [requests, places], of which each has `counts` [requests]; begins: [requests + 1], first row of each.
    """
    places = torch.arange(sampled.shape[1], device=sampled.device)
    taken = places < counts.unsqueeze(1)
    where = torch.where(taken, begins[:-1].unsqueeze(1) + places, rows)  # those not sampled go behind the last row
    found = sampled.new_zeros(rows + 1)
    return found.scatter_(0, where.flatten().long(), sampled.flatten())[:rows]
