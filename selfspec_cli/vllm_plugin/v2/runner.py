"""What vLLM's V2 model runner does with a speculator of early exit: it tells it of new requests, and leaves it out of
steps without drafts that follow such steps.

vLLM's runner hands every step to its speculator, writes that it drafted nothing into the requests' rows and reads them
out again: some five small kernels, which a plain engine does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from selfspec_cli.vllm_plugin.v2.scheduling import CHOICE
from selfspec_cli.vllm_plugin.wrap import around

NOTHING = torch.empty(0, 0)


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
    self.draft_tokens_handler.set_draft_tokens(step.input_batch, NOTHING)
    kept = self.speculator, self.num_speculative_steps
    self.speculator, self.num_speculative_steps = None, 0
    try:
        return original(self, *args, **kwargs)
    finally:
        self.speculator, self.num_speculative_steps = kept


def _drafting_is_disabled(runner: Any, step: Any) -> bool:
    """Whether a step (vLLM's ExecuteModelState) verifies no drafts and makes none, and the last one made none either.

    The first step that makes none is the speculator's, which takes in what was accepted. Requests with a grammar wait
    for drafts to check, and ranks of a pipeline for a message with drafts.
    """
    return (
        getattr(runner.speculator, "drafting_disabled", False)  # vLLM's own have no such word
        and step.num_spec_tokens_to_schedule == 0
        and step.input_batch.num_draft_tokens == 0
        and not step.input_batch.has_structured_output_reqs
        and runner.pp_handler is None
    )
