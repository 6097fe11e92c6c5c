"""What vLLM's V2 model runner and its rejection sampler do otherwise with early exit.

The runner tells the speculator of new requests, and leaves it out of steps without drafts that follow such steps, which
saves some five small kernels.

The V2 scheduler plans a step before the drafts of the last one exist, so every request is verified at k places. Places
beyond what a request drafted hold token 0, which the model can embed; the rejection sampler gets these as invalid
drafts, as vLLM marks drafts that a grammar forbids. It also gives log-probabilities of chosen tokens
(`logprob_token_ids`), which vLLM 0.32 leaves out of steps with drafts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.overrides import copied_as, overriding
from selfspec_cli.vllm_plugin.v2.scheduling import CHOICE
from selfspec_cli.vllm_plugin.wrap import around

NO_DRAFTS = torch.empty(0, 0)


@around
def tell_speculator(original: Callable[..., None], self: Any, scheduler_output: Any) -> None:
    """Override of `GPUModelRunner.add_requests`: the speculator hears of new requests and of the choice that a step was
    planned by, before it drafts for them, and the manager of graphs (graphs.py) how many tokens each request has."""
    original(self, scheduler_output)
    self.cudagraph_manager.step = scheduler_output.num_scheduled_tokens
    choice, set_choice = getattr(scheduler_output, CHOICE, None), getattr(self.speculator, "set_choice", None)
    if choice is not None and set_choice is not None:
        set_choice(choice)
    tell = getattr(self.speculator, "add_requests", None)  # vLLM's own speculators have none
    new = scheduler_output.scheduled_new_reqs
    if tell is not None and new:
        slots = self.req_states.req_id_to_index
        places = [slots[one.req_id] for one in new]
        verified = bool(scheduler_output.scheduled_spec_decode_tokens)
        tell(places, [one.sampling_params for one in new], [one.prompt_len for one in new], verified)


@around
def leave_out_drafting(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of `GPUModelRunner.sample_tokens`: a step with drafting disabled runs without a speculator."""
    step, clock = self.execute_model_state, getattr(self.speculator, "clock", None)
    if clock is not None:
        clock.launched = time.perf_counter()  # the forward pass is, a moment ago; step_order.py reads it
    if step is None or not _drafting_is_disabled(self, step):
        return original(self, *args, **kwargs)
    # What a scheduler that asks for drafts gets: none, of these requests.
    self.draft_tokens_handler.set_draft_tokens(step.input_batch, NO_DRAFTS)
    kept = self.speculator, self.num_speculative_steps
    self.speculator, self.num_speculative_steps = None, 0
    try:
        return original(self, *args, **kwargs)
    finally:
        self.speculator, self.num_speculative_steps = kept


def _drafting_is_disabled(runner: Any, step: Any) -> bool:
    """Whether a step (vLLM's ExecuteModelState) verifies no drafts and makes none, and the speculator took in the last
    ones. Requests with a grammar wait for drafts to check, and ranks of a pipeline for a message with drafts."""
    return (
        getattr(runner.speculator, "drafting_disabled", False)  # vLLM's own have no such word
        and step.num_spec_tokens_to_schedule == 0
        and step.input_batch.num_draft_tokens == 0
        and not step.input_batch.has_structured_output_reqs
        and runner.pp_handler is None
    )


LENGTHS = "early_exit_lengths"
"""Attribute of an engine's `RequestState`, which its speculator is made with and its sampler knows: int32 [requests],
tokens that each request drafted in the last round. Another engine in the same process has a `RequestState` of its own.
"""


def verify_no_more_than(requests: vllm.RequestState, lengths: Tensor) -> None:
    """From now on, the engine of `requests` verifies of each request no more tokens than it drafted."""
    setattr(requests, LENGTHS, lengths)


@around
def with_short_draft_sampler(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Override of the V2 runner's `load_model`, which makes its samplers."""
    original(self, *args, **kwargs)
    theirs = self.rejection_sampler
    if theirs is not None:
        call = {"__call__": lambda verify: with_chosen_tokens(with_short_drafts(verify))}
        self.rejection_sampler = copied_as(overriding(type(theirs), call), theirs)


@around
def with_short_drafts(
    original: Callable[..., Any],
    self: vllm.RejectionSampler,
    logits: Tensor,
    input_batch: vllm.InputBatch,
    draft_logits: Tensor | None = None,
    invalid_drafts: Tensor | None = None,
) -> Any:
    """Override of the V2 rejection sampler's `__call__`: what was never drafted is rejected."""
    lengths = getattr(self.sampler.req_states, LENGTHS, None)
    if lengths is not None:
        from selfspec_cli.vllm_plugin.v2.kernels import undrafted

        never = undrafted(input_batch.expanded_local_pos, input_batch.expanded_idx_mapping, lengths)
        invalid_drafts = never if invalid_drafts is None else never | invalid_drafts
    return original(self, logits, input_batch, draft_logits, invalid_drafts)


@around
def with_chosen_tokens(
    original: Callable[..., Any], self: Any, logits: Tensor, input_batch: vllm.InputBatch, *args: Any, **kwargs: Any
) -> Any:
    """Override of the V2 rejection sampler's `__call__`: a request gets the log-probabilities of the tokens that it
    chose also where drafts are verified. vLLM gives it the likeliest tokens there, or none."""
    sampler, requests = self.sampler, input_batch.idx_mapping_np
    most = sampler.logprob_token_ids_state.max_num_token_ids(requests)
    if not most:
        return original(self, logits, input_batch, *args, **kwargs)
    processed: list[Tensor] = []
    if sampler.logprobs_mode.startswith("processed"):
        self = copy.copy(self)
        self.sampler = _keeping(sampler, processed)
    output = original(self, logits, input_batch, *args, **kwargs)
    output.logprobs_tensors = vllm.compute_topk_scores(
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
    sampled: [requests, places], of which each has `counts` [requests]; begins: [requests + 1], first row of each."""
    places = torch.arange(sampled.shape[1], device=sampled.device)
    taken = places < counts.unsqueeze(1)
    where = torch.where(taken, begins[:-1].unsqueeze(1) + places, rows)  # those not sampled go behind the last row
    found = sampled.new_zeros(rows + 1)
    return found.scatter_(0, where.flatten().long(), sampled.flatten())[:rows]
