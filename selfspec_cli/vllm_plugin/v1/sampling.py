"""What vLLM 0.32's V1 model runner gets wrong when it verifies speculated tokens, whatever has drafted them; how a
draft is drawn there; and logits processors and thinking budgets, few of which it serves beside drafts: min_p,
logit_bias, custom ones and budgets are applied to requests that draft nothing.

vLLM lays out the rows of a step as one for each draft wherever the engine speculates. In a step without drafts that is
no row at all, so that one request's budget is carried out on another. Thinking that ends by itself inside accepted
drafts is ended again when the budget runs out, and a request without a budget that moves into the row of one that has
ended is given that one's. So each request with a budget has vLLM's own states for itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.overrides import copied_as, overriding
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.weights.shared import shallow_copy
from selfspec_cli.vllm_plugin.wrap import around

SMALLEST = torch.finfo(torch.float32).tiny


def draw(logits: Tensor, temperature: Tensor, generators: Mapping[int, torch.Generator]) -> tuple[Tensor, Tensor]:
    """A draft token [n] from each row of `logits` [n, V] at its temperature [n], and the distributions [n, V].
    generators: of rows whose requests have a seed, so that drafts repeat; vLLM draws drafts from the process's."""
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
    a token, drops it and rewinds the generator, which ends an engine on a CPU: generators there have no offset."""
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
    """Override of `Sampler.apply_logits_processors`: `min_tokens` counts the drafts before a bonus token. vLLM forbids
    stop tokens for it wherever the round began before `min_tokens`. Where all drafts are accepted the request is longer
    by then, so it may pass over a stop token that plain decoding would take. logits: [requests, vocabulary]."""
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
