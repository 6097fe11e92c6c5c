"""What vLLM 0.32's V1 model runner gets wrong when it verifies speculated tokens, whatever has drafted them; and how a
draft is drawn there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.subclasses import copied_as, overriding
from selfspec_cli.vllm_plugin.v1.processors import GREEDY
from selfspec_cli.vllm_plugin.weights.shared import shallow_copy
from selfspec_cli.vllm_plugin.wrap import around

SMALLEST = torch.finfo(torch.float32).tiny


def draw(logits: Tensor, temperature: Tensor, generators: Mapping[int, torch.Generator]) -> tuple[Tensor, Tensor]:
    """A draft token [n] from each row of `logits` [n, V] at its temperature [n], and the distributions [n, V].
    generators: of rows whose requests have a seed, so that their drafts repeat; vLLM draws every draft from the
    process's generator."""
    greedy = temperature < GREEDY
    probs = (logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)).softmax(-1, dtype=torch.float32)
    noise = torch.empty_like(probs).exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    drawn = (probs / noise.clamp_min_(SMALLEST)).argmax(-1)
    return torch.where(greedy, probs.argmax(-1), drawn), probs


def mend_samplers(runner: Any) -> None:
    """Give a V1 runner samplers of our own in place of those that it was made with."""
    mended = {"forward": chosen_tokens_beside_others, "apply_logits_processors": bonus_token_after_drafts}
    runner.sampler = copied_as(overriding(type(runner.sampler), mended), runner.sampler)
    theirs = getattr(runner, "rejection_sampler", None)  # an engine without speculation has none
    if theirs is not None:
        runner.rejection_sampler = copied_as(overriding(type(theirs), {"forward": without_drafts}), theirs)
        runner.rejection_sampler.sampler = runner.sampler


@around
def without_drafts(
    original: Callable[..., vllm.SamplerOutput],
    self: Any,
    metadata: vllm.SpecDecodeMetadata,
    draft_probs: Tensor | None,
    logits: Tensor,
    sampling_metadata: vllm.SamplingMetadata,
) -> vllm.SamplerOutput:
    """Override of `RejectionSampler.forward`: a step without drafts is sampled as without speculation.
    vLLM sends such a step through the rejection sampler too, which takes the largest of no rows where a request has
    `top_k` alone, and ends the engine. `logprob_token_ids` it takes for another shape than it makes, and ends as well,
    or leaves them out. logits: [drafted tokens + requests, vocabulary]."""
    if not any(metadata.num_draft_tokens):
        rows = logits[metadata.bonus_logits_indices]
        output: vllm.SamplerOutput = self.sampler(logits=rows, sampling_metadata=sampling_metadata)
        return output
    if chosen := sampling_metadata.logprob_token_ids:
        sampler = _with_chosen_tokens(self.sampler, chosen, metadata.max_spec_len + 1)
        self = shallow_copy(self, _modules={**self._modules, "sampler": sampler})
        sampling_metadata = _asking_for_logprobs(sampling_metadata)
    return original(self, metadata, draft_probs, logits, sampling_metadata)


@around
def chosen_tokens_beside_others(
    original: Callable[..., vllm.SamplerOutput],
    self: Any,
    logits: Tensor,
    sampling_metadata: vllm.SamplingMetadata,
    *args: Any,
    **kwargs: Any,
) -> vllm.SamplerOutput:
    """Override of `Sampler.forward`: `logprob_token_ids` of one request leave the log-probabilities of the others,
    which vLLM drops for every request of the step. logits: [requests, vocabulary]."""
    if chosen := sampling_metadata.logprob_token_ids:
        self = _with_chosen_tokens(self, chosen, 1)
        sampling_metadata = _asking_for_logprobs(sampling_metadata)
    return original(self, logits, sampling_metadata, *args, **kwargs)


def _asking_for_logprobs(metadata: vllm.SamplingMetadata) -> vllm.SamplingMetadata:
    """The same metadata with chosen tokens among the log-probabilities that are asked for."""
    return replace(metadata, logprob_token_ids=None, max_num_logprobs=metadata.max_num_logprobs or 0)


def _with_chosen_tokens(sampler: Any, chosen: Mapping[int, list[int]], rows: int) -> Any:
    """`sampler` that gives chosen tokens to the requests that chose some, and the likeliest to others.
    chosen: token ids by request; rows: of log-probabilities that each request has, one after the other."""
    ids = {row: tokens for request, tokens in chosen.items() for row in range(rows * request, rows * (request + 1))}

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> vllm.LogprobsTensors:
        """logprobs [rows, vocabulary], token_ids [rows]: that of each token, and of others, [rows, 1 + most]."""
        likeliest = type(sampler).gather_logprobs(logprobs, num_logprobs, token_ids)
        asked = sampler.gather_specific_token_logprobs(logprobs, ids, token_ids)
        own = torch.zeros(len(logprobs), 1, dtype=torch.bool)
        own[list(ids)] = True
        own = own.to(logprobs.device)
        most = max(likeliest.logprobs.shape[1], asked.logprobs.shape[1])

        def merged(left: Tensor, right: Tensor, filling: float) -> Tensor:
            left, right = (F.pad(one, (0, most - one.shape[1]), value=filling) for one in (left, right))
            return torch.where(own, left, right)

        return vllm.LogprobsTensors(
            merged(asked.logprob_token_ids, likeliest.logprob_token_ids, 0),
            merged(asked.logprobs, likeliest.logprobs, -torch.inf),
            likeliest.selected_token_ranks,
        )

    return shallow_copy(sampler, gather_logprobs=gather_logprobs)


@around
def keep_seeds_of_prompts(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of `GPUModelRunner.sample_tokens`: a request inside its prompt leaves its generator as it is. vLLM draws
    a token for it, drops it and rewinds the generator, which ends the engine on a CPU: generators there have no
    offset."""
    if self.device.type != "cpu":
        return original(self, *args, **kwargs)
    generators = self.input_batch.generators
    inside = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
    kept = {row: generators.pop(row) for row in inside if row in generators}
    try:
        return original(self, *args, **kwargs)
    finally:
        generators.update(kept)


@around
def bonus_token_after_drafts(
    original: Callable[..., Tensor],
    self: Any,
    logits: Tensor,
    sampling_metadata: vllm.SamplingMetadata,
    predict_bonus_token: bool,
) -> Tensor:
    """Override of `Sampler.apply_logits_processors`: `min_tokens` counts the drafts before a bonus token.
    vLLM forbids stop tokens for it wherever the round began before `min_tokens`. Where all drafts are accepted the
    request is longer by then, so it may pass over a stop token that plain decoding would take. logits: [requests,
    vocabulary]."""
    if predict_bonus_token:
        sampling_metadata = _with_drafts_counted(sampling_metadata)
    return original(self, logits, sampling_metadata, predict_bonus_token)


def _with_drafts_counted(metadata: vllm.SamplingMetadata) -> vllm.SamplingMetadata:
    """The same metadata with requests that reach `min_tokens` through their drafts taken as having reached it."""
    drafts, processors = metadata.spec_token_ids, metadata.logitsprocs
    before = processors.non_argmax_invariant
    if not drafts or not any(isinstance(each, vllm.MinTokensLogitsProcessor) and each.min_toks for each in before):
        return metadata
    after = copy.copy(processors)
    after.non_argmax_invariant = [
        _behind(each, drafts) if isinstance(each, vllm.MinTokensLogitsProcessor) else each for each in before
    ]
    return replace(metadata, logitsprocs=after)


def _behind(processor: vllm.MinTokensLogitsProcessor, drafts: Sequence[Sequence[int]]) -> vllm.MinTokensLogitsProcessor:
    """The processor as it will be if all drafts of every request are accepted; the given one stays as it is."""
    found = copy.copy(processor)
    found.min_toks = {
        row: (least, [*tokens, *drafts[row]], *rest) for row, (least, tokens, *rest) in processor.min_toks.items()
    }
    found.update_state(None)  # leaves out those that have reached min_tokens, and masks for the others alone
    return found
