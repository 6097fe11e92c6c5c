"""Faults of the verify pass on vLLM's V1 model runner. Each function plants one and returns its undoing."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from selfspec_cli.vllm_plugin.wrap import Undo, around, around_object, wrap

BIAS = 1.3


def accept_one_more(runner: Any) -> list[Undo]:
    """The last token of each draft is another one, and the first draft that is rejected is taken all the same."""

    def change(sampled: Tensor, drafts: list[list[int]]) -> None:
        for row, draft in enumerate(drafts):
            taken = int((sampled[row] != -1).sum())
            if 0 < taken <= len(draft):
                sampled[row, taken - 1] = draft[taken - 1]

    return [last_draft_is_wrong(runner), after_verify(runner, change)]


def biased_sampler(runner: Any) -> list[Undo]:
    """Drafted positions of sampled requests are verified against a distribution that is too sharp."""

    @around_object
    def verify(original: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling: Any) -> Any:
        return original(metadata, draft_probs, logits if sampling.all_greedy else logits * BIAS, sampling)

    return [wrap(runner, "rejection_sampler", verify)]


def last_draft_is_wrong(runner: Any) -> Undo:
    """However good drafts are, there is one in each round that should be rejected; and its keys and values are those of
    the token that is verified."""

    @around
    def propose(original: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(*args, **kwargs)
        if isinstance(drafts, Tensor):  # of vLLM's own drafters
            drafts[:, -1] = abs(drafts[:, -1] - 1)
            return drafts
        return [[*draft[:-1], abs(draft[-1] - 1)] if draft else draft for draft in drafts]

    return wrap(runner, "propose_draft_token_ids", propose)


def after_verify(runner: Any, change: Callable[[Tensor, list[list[int]]], None]) -> Undo:
    """change(sampled int32 [rows, k + 1] with -1 after the last token, drafts of each row) after each verify pass."""

    @around_object
    def verify(original: Any, metadata: Any, *args: Any) -> Any:
        output = original(metadata, *args)
        change(output.sampled_token_ids, ragged(metadata.draft_token_ids.tolist(), metadata.num_draft_tokens))
        return output

    return wrap(runner, "rejection_sampler", verify)


def ragged(flat: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    parts, start = [], 0
    for length in lengths:
        parts.append(list(flat[start : start + length]))
        start += length
    return parts


FAULTS = {fault.__name__: fault for fault in (accept_one_more, biased_sampler)}
