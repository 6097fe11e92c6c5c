"""Logits processors and thinking budgets on vLLM 0.32's V1 model runner, which serves few of them beside drafts: min_p,
logit_bias, custom ones and budgets are applied to requests that draft nothing.

vLLM lays out the rows of a step as one for each draft wherever the engine speculates. In a step without drafts that is
no row at all, so that one request's budget is carried out on another. Thinking that ends by itself inside accepted
drafts is ended again when the budget runs out, and a request without a budget that moves into the row of one that has
ended is given that one's. So each request with a budget has vLLM's own states for itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.wrap import around

GREEDY = 1e-5  # vLLM's: a request at a lower temperature is greedy


@around
def build_all(
    original: Callable[..., vllm.LogitsProcessors], vllm_config: vllm.VllmConfig, *args: Any, **kwargs: Any
) -> vllm.LogitsProcessors:
    """Replacement for `build_logitsprocs`: an engine with early exit has every processor of a plain one."""
    if settings_of(vllm_config) is None:
        return original(vllm_config, *args, **kwargs)
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    built = original(plain, *args, **kwargs)
    if whole := [type(one).__name__ for one in _custom(built) if not _by_request(one)]:
        logging.getLogger("vllm.selfspec").warning(
            "nothing is drafted beside the logits processors %s, which act on whole batches; requests that an "
            "AdapterLogitsProcessor leaves alone are drafted for",
            ", ".join(whole),
        )
    return built


def _custom(processors: vllm.LogitsProcessors) -> Iterator[Any]:
    """Processors that are not vLLM's own."""
    return (one for one in processors.all if not type(one).__module__.startswith("vllm."))


def _by_request(processor: Any) -> bool:
    return isinstance(processor, vllm.AdapterLogitsProcessor)


def not_to_draft(batch: Any, requests: Mapping[str, Any]) -> set[int]:
    """Rows of a batch whose requests, by name in `requests`, draft nothing, because vLLM applies to one row a request
    what they ask for: a custom processor, a thinking budget, `logit_bias`, or `min_p` of a sampled one."""
    rows: set[int] = set()
    for row, name in enumerate(batch.req_ids):
        asked = requests[name].sampling_params
        if asked is not None and (
            asked.logit_bias or asked.thinking_token_budget is not None or (asked.min_p and asked.temperature >= GREEDY)
        ):
            rows.add(row)
    for one in _custom(batch.logitsprocs):
        rows |= set(one.req_info) if _by_request(one) else set(range(batch.num_reqs))
    return rows


@around
def constrain_drafts(
    original: Callable[..., Tensor],
    logits: Tensor,
    cu_num_draft_tokens: Tensor,
    sampling_metadata: vllm.SamplingMetadata,
) -> Tensor:
    """Replacement for `apply_sampling_constraints`: drafts are verified with their request's temperature, `top_k` and
    `top_p`.
    On a CPU vLLM's kernel that gives each drafted position its request's value writes into an int64 copy of the output
    and drops it, so the three are whatever the memory held, whatever drafts: sampled requests follow no distribution,
    and greedy ones beside them are not argmax. logits: [drafts, vocabulary], not yet divided by the temperature."""
    given = sampling_metadata.temperature
    if logits.device.type != "cpu" or sampling_metadata.all_greedy or given is None:
        return original(logits, cu_num_draft_tokens, sampling_metadata)
    counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    temperature = torch.where(given == 0, 1.0, given)[rows]
    top = [None if each is None else each[rows] for each in (sampling_metadata.top_k, sampling_metadata.top_p)]
    constrained: Tensor = vllm.apply_top_k_top_p(logits.div_(temperature.unsqueeze(1)), *top)
    return constrained


@around
def follow_budgets(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Override of the V1 runner's `initialize_kv_cache`, after which its batch is the one that serves requests."""
    original(self, *args, **kwargs)
    batch = self.input_batch
    theirs = batch.thinking_budget_state_holder
    if theirs is not None:
        kind, config = type(theirs), self.vllm_config.reasoning_config
        budgets = Budgets(lambda: kind(config, 1, 0, self.device, False))
        batch.thinking_budget_state_holder = batch.sampling_metadata.thinking_budget_state_holder = budgets


@dataclass
class Followed:
    """A request with a budget. holder: vLLM's, of this request alone; reached: output tokens that it has seen."""

    holder: Any
    reached: int = 0

    def move_on(self, tokens: list[int]) -> None:
        """Show the holder `tokens`, all of the output, in steps of one token, as plain decoding does."""
        for length in range(min(self.reached + 1, len(tokens)), len(tokens) + 1):
            self.holder.update_state([tokens[:length]], [[]])
        self.reached = len(tokens)


class Budgets:
    """In place of vLLM's `ThinkingBudgetStateHolder`, for batches in which requests with a budget have no drafts.
    alone: makes a holder of vLLM's for one request, as a plain engine has it."""

    def __init__(self, alone: Callable[[], Any]) -> None:
        self._alone = alone
        self.followed: dict[int, Followed] = {}  # by row of the batch

    def has_tracked_requests(self) -> bool:
        return bool(self.followed)

    def sync_batch(self, batch_update: Any) -> None:
        """Follow requests that come, go and change rows, as vLLM's logits processors do."""
        vllm.process_dict_updates(self.followed, batch_update, self._beginning)

    def _beginning(self, params: Any, prompt: list[int] | None, output: list[int]) -> Followed | None:
        """A new request; None for one without a budget."""
        if params.thinking_token_budget is None:
            return None
        holder = self._alone()
        holder.sync_batch(vllm.BatchUpdate(batch_size=1, removed=[], added=[(0, params, prompt, [])], moved=[]))
        return Followed(holder)

    def update_state(
        self,
        output_token_ids: Sequence[list[int]],
        spec_token_ids: Sequence[list[int]] | None,
        repeat_indices: Tensor | None = None,
    ) -> None:
        """output_token_ids: committed tokens by request."""
        for row, request in self.followed.items():
            request.move_on(output_token_ids[row])

    def apply_to_logits(
        self, logits: Tensor, predict_bonus_token: bool, spec_token_ids: Sequence[list[int]] | None
    ) -> Tensor:
        """Force tokens in `logits` [requests, vocabulary]. Logits of drafts are of requests without a budget."""
        if predict_bonus_token or not any(spec_token_ids or ()):
            for row, request in self.followed.items():
                request.holder.apply_to_logits(logits[row : row + 1], False, [[]])
        return logits
