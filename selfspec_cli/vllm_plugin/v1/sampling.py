"""What vLLM 0.32's V1 model runner gets wrong when it verifies speculated tokens, whatever has drafted them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import MinTokensLogitsProcessor, SamplingMetadata


def expand_on_cpu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement for the rejection sampler's `expand_batch_to_tokens`, in PyTorch where tensors are on the CPU.

    vLLM's C++ kernel writes into an int64 copy of the output and drops it, so temperature, top-k and top-p of drafted
    positions are whatever the memory held: sampled requests follow no distribution, and greedy ones beside them are not
    argmax. Any speculative method has it (seen with n-gram too).
    """

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: Any = 0, replace_to: Any = 0
    ) -> Tensor:
        """[requests] -> [num_tokens]: each request's value once for each of its tokens; replace_from -> replace_to."""
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def bonus_token_after_drafts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement for `Sampler.apply_logits_processors`: `min_tokens` counts the drafts before a bonus token.

    vLLM forbids stop tokens for the bonus token wherever the round began before `min_tokens`. Where all drafts are
    accepted the request is longer by then, so it may pass over a stop token that plain decoding would take.
    """

    def apply_logits_processors(
        self: Any, logits: Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> Tensor:
        """logits: [requests, vocabulary]; for a bonus token, those behind the drafts of each request."""
        if predict_bonus_token:
            sampling_metadata = _with_drafts_counted(sampling_metadata)
        return original(self, logits, sampling_metadata, predict_bonus_token)

    return apply_logits_processors


def _with_drafts_counted(metadata: SamplingMetadata) -> SamplingMetadata:
    """The same metadata with requests that reach `min_tokens` through their drafts taken as having reached it."""
    from selfspec_cli.vllm_plugin.vllm_names import MinTokensLogitsProcessor

    drafts, processors = metadata.spec_token_ids, metadata.logitsprocs
    before = processors.non_argmax_invariant
    if not drafts or not any(isinstance(each, MinTokensLogitsProcessor) and each.min_toks for each in before):
        return metadata
    after = copy.copy(processors)
    after.non_argmax_invariant = [
        _behind(each, drafts) if isinstance(each, MinTokensLogitsProcessor) else each for each in before
    ]
    return replace(metadata, logitsprocs=after)


def _behind(processor: MinTokensLogitsProcessor, drafts: Sequence[Sequence[int]]) -> MinTokensLogitsProcessor:
    """The processor as it will be if all drafts of every request are accepted; the given one stays as it is."""
    found = copy.copy(processor)
    found.min_toks = {
        row: (least, [*tokens, *drafts[row]], *rest) for row, (least, tokens, *rest) in processor.min_toks.items()
    }
    found.update_state(None)  # leaves out those that have reached min_tokens, and masks for the others alone
    return found
