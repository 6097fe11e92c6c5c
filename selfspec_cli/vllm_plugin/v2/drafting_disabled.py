"""Steps without drafts, on vLLM's V2 model runner, that follow such steps: nothing is left of drafting in them.

vLLM's runner hands every step to its speculator, writes that it drafted nothing into the requests' rows and reads them
out again: some five small kernels, which a plain engine does not have.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch


def leave_out_drafting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Override of `GPUModelRunner.sample_tokens`: a step with drafting disabled runs without a speculator."""

    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        step, clock = self.execute_model_state, getattr(self.speculator, "clock", None)
        if clock is not None:
            clock.launched = time.perf_counter()  # the forward pass is, a moment ago; step_order.py reads it
        if step is None or not drafting_is_disabled(self, step):
            return original(self, *args, **kwargs)
        return _without_drafting(self, step, original, *args, **kwargs)

    return sample_tokens


def _without_drafting(runner: Any, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What a scheduler that asks for drafts gets: none, of these requests.
    runner.draft_tokens_handler.set_draft_tokens(step.input_batch, torch.empty(0, 0))
    kept = runner.speculator, runner.num_speculative_steps
    runner.speculator, runner.num_speculative_steps = None, 0
    try:
        return original(runner, *args, **kwargs)
    finally:
        runner.speculator, runner.num_speculative_steps = kept


def drafting_is_disabled(runner: Any, step: Any) -> bool:
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
