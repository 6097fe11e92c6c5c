"""Logits processors on vLLM 0.32's V1 model runner, which serves few of them beside drafts: min_p, logit_bias and
custom ones are applied to requests that draft nothing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
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
    """Rows of a batch whose requests draft nothing, because drafts would have to be verified with what vLLM applies to
    one row a request: a custom processor, a thinking budget (thinking.py), `logit_bias`, or `min_p` of a sampled one.

    requests: all that the runner has, by name.
    """
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
    """Replacement for `apply_sampling_constraints`: drafts are verified with the temperature, `top_k` and `top_p` of
    their request.

    On a CPU vLLM's kernel that gives each drafted position its request's value writes into an int64 copy of the output
    and drops it, so the three are whatever the memory held: sampled requests follow no distribution, and greedy ones
    beside them are not argmax. Any speculative method has it (seen with n-gram too). logits: [drafts, vocabulary], not
    yet divided by the temperature.
    """
    given = sampling_metadata.temperature
    if logits.device.type != "cpu" or sampling_metadata.all_greedy or given is None:
        return original(logits, cu_num_draft_tokens, sampling_metadata)
    counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    temperature = torch.where(given == 0, 1.0, given)[rows]
    top = [None if each is None else each[rows] for each in (sampling_metadata.top_k, sampling_metadata.top_p)]
    constrained: Tensor = vllm.apply_top_k_top_p(logits.div_(temperature.unsqueeze(1)), *top)
    return constrained
