"""min_p, logit_bias and custom logits processors on vLLM 0.32's V1 model runner, which serves none beside drafts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.spec_config import settings_of

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import (
        LogitsProcessors,
        SamplingMetadata,
        SpecDecodeMetadata,
        VllmConfig,
    )


def build_all(original: Callable[..., LogitsProcessors]) -> Callable[..., LogitsProcessors]:
    """Replacement for `build_logitsprocs`: an engine with early exit has every processor of a plain one."""

    def build_logitsprocs(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> LogitsProcessors:
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

    return build_logitsprocs


def _custom(processors: LogitsProcessors) -> Iterator[Any]:
    """Processors that are not vLLM's own."""
    return (one for one in processors.all if not type(one).__module__.startswith("vllm."))


def _by_request(processor: Any) -> bool:
    from selfspec_cli.vllm_plugin.vllm_names import AdapterLogitsProcessor

    return isinstance(processor, AdapterLogitsProcessor)


def not_to_draft(processors: LogitsProcessors, requests: int) -> set[int]:
    """Rows of a batch of `requests` that a custom processor acts on: it sees one row a request, and no drafts."""
    rows: set[int] = set()
    for one in _custom(processors):
        rows |= set(one.req_info) if _by_request(one) else set(range(requests))
    return rows


def biases(processors: LogitsProcessors) -> dict[int, dict[int, float]]:
    """`logit_bias` of each request that has one: row of the batch -> token id -> what is added to its logit."""
    from selfspec_cli.vllm_plugin.vllm_names import LogitBiasLogitsProcessor

    found: dict[int, dict[int, float]] = {}
    for one in processors.non_argmax_invariant:
        if isinstance(one, LogitBiasLogitsProcessor):
            found |= one.biases
    return found


def add_biases(logits: Tensor, rows: Sequence[int], wanted: dict[int, dict[int, float]]) -> Tensor:
    """Add each request's bias to its rows of `logits` [n, vocabulary], in place. rows: the request of each of the n."""
    for place, row in enumerate(rows):
        if bias := wanted.get(row):
            logits[place, list(bias)] += torch.tensor(list(bias.values()), device=logits.device)
    return logits


def mask_unlikely(logits: Tensor, temperature: Tensor, rows: Tensor, processors: LogitsProcessors) -> Tensor:
    """-inf in `logits` [n, vocabulary], in place, for tokens below `min_p` of the likeliest at each temperature [n].

    rows: the request of each of the n, as its row of the batch.
    """
    from selfspec_cli.vllm_plugin.vllm_names import MinPLogitsProcessor

    for one in processors.argmax_invariant:
        if isinstance(one, MinPLogitsProcessor) and one.min_p_count:
            expanded = copy.copy(one)
            expanded.min_p = one.min_p[rows]
            scaled = expanded.apply(logits / temperature.unsqueeze(1))
            logits.masked_fill_(scaled.isneginf(), -torch.inf)
    return logits


def bias_drafts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Override of `RejectionSampler.apply_logits_processors`: drafts are verified with their request's bias.

    Before vLLM's own: a bias is added and a penalty scales, in this order without drafts.
    """

    def apply_logits_processors(
        self: Any, logits: Tensor, sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
    ) -> Tensor:
        """logits: [drafts, vocabulary]."""
        if wanted := biases(sampling_metadata.logitsprocs):
            rows = [row for row, count in enumerate(metadata.num_draft_tokens) for _ in range(count)]
            logits = add_biases(logits, rows, wanted)
        return original(self, logits, sampling_metadata, metadata)

    return apply_logits_processors


def constrain_drafts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement for `apply_sampling_constraints`: drafts are verified with the temperature, `min_p`, `top_k` and
    `top_p` of their request.

    vLLM leaves out `min_p`. And on a CPU its kernel that gives each drafted position its request's value writes into an
    int64 copy of the output and drops it, so the other three are whatever the memory held: sampled requests follow no
    distribution, and greedy ones beside them are not argmax. Any speculative method has it (seen with n-gram too).
    """

    def apply_sampling_constraints(
        logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """logits: [drafts, vocabulary], not yet divided by the temperature."""
        given = sampling_metadata.temperature
        if logits.device.type != "cpu" or sampling_metadata.all_greedy or given is None:
            return original(logits, cu_num_draft_tokens, sampling_metadata)
        from selfspec_cli.vllm_plugin.vllm_names import apply_top_k_top_p

        counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        temperature = torch.where(given == 0, 1.0, given)[rows]
        logits = mask_unlikely(logits, temperature, rows, sampling_metadata.logitsprocs)
        top = [None if each is None else each[rows] for each in (sampling_metadata.top_k, sampling_metadata.top_p)]
        constrained: Tensor = apply_top_k_top_p(logits.div_(temperature.unsqueeze(1)), *top)
        return constrained

    return apply_sampling_constraints
