"""What a step of vLLM's V2 model runner brings: new requests, made known to the speculator before it first drafts for
them, and how many tokens each request has in it, made known to the manager of graphs (graphs.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from selfspec_cli.vllm_plugin.v2.widths import CHOICE


def tell_speculator(original: Callable[..., None]) -> Callable[..., None]:
    """Override of `GPUModelRunner.add_requests`."""

    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> None:
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

    return add_requests
