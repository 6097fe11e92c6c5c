"""Faults of the verify pass on vLLM's V2 model runner. Each function plants one and returns its undoing.

What is wrapped is called between CUDA graphs, never inside one, so a fault can come and go without a recapture."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.wrap import Undo, around, around_object, wrap

BIAS = 1.3


def accept_one_more(runner: Any) -> list[Undo]:
    """The last token of each draft is another one, and the first draft that is rejected is taken all the same."""

    def change(output: Any, batch: Any) -> None:
        starts, taken, places, lengths = verdict_of(runner, output, batch)
        wrong = (taken > 0) & (taken <= torch.minimum(places, lengths))
        last = (taken - 1).clamp_min(0).unsqueeze(1)
        kept = output.sampled_token_ids.gather(1, last)
        draft = draft_at(batch, starts + taken).unsqueeze(1).to(kept.dtype)
        output.sampled_token_ids.scatter_(1, last, torch.where(wrong.unsqueeze(1), draft, kept))

    return [last_draft_is_wrong(runner), after_verify(runner, change)]


def biased_sampler(runner: Any) -> list[Undo]:
    """Verified positions are sampled from a distribution that is too sharp; the most likely token stays that."""

    @around_object
    def verify(original: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(logits * BIAS, *args, **kwargs)

    return [wrap(runner, "rejection_sampler", verify)]


def last_draft_is_wrong(runner: Any) -> Undo:
    """However good drafts are, there is one in each round that should be rejected; and its keys and values are those of
    the token that is verified."""

    def after(drafts: Tensor, batch: Any, num_sampled: Tensor, num_rejected: Tensor) -> None:
        state = getattr(runner.speculator, "state", None)
        rows = batch.idx_mapping[: len(drafts)]
        count = drafts.new_full(rows.shape, drafts.shape[1]) if state is None else state.lengths[rows].long()
        last = (count - 1).clamp_min(0).unsqueeze(1)
        token = drafts.gather(1, last)
        drafts.scatter_(1, last, torch.where((count > 0).unsqueeze(1), (token - 1).abs(), token))

    return around_propose(runner, after=after)


def around_propose(
    runner: Any,
    before: Callable[[Any, Tensor, Tensor], Tensor] = lambda batch, num_sampled, num_rejected: num_rejected,
    after: Callable[[Tensor, Any, Tensor, Tensor], None] = lambda drafts, batch, num_sampled, num_rejected: None,
) -> Undo:
    """before: returns num_rejected as the draft loop is to see it."""

    @around
    def propose(
        original: Any,
        batch: Any,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        sampled: Tensor,
        rejected: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if more.get("dummy_run"):
            return original(batch, a, b, c, d, sampled, rejected, *rest, **more)
        drafts = original(batch, a, b, c, d, sampled, before(batch, sampled, rejected), *rest, **more)
        after(drafts, batch, sampled, rejected)
        return drafts

    return wrap(runner.speculator, "propose", propose)


def after_verify(runner: Any, change: Callable[[Any, Any], None]) -> Undo:
    @around_object
    def verify(original: Any, logits: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(logits, batch, *args, **kwargs)
        change(output, batch)
        return output

    return wrap(runner, "rejection_sampler", verify)


def verdict_of(runner: Any, output: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row, int64 [rows]: where its logits begin, tokens taken, places verified, tokens that were drafted."""
    ends, state = batch.cu_num_logits.long(), getattr(runner.speculator, "state", None)
    places = ends.diff() - 1
    lengths = places if state is None else state.lengths[batch.idx_mapping].long()
    return ends[:-1], output.num_sampled.long(), places, lengths


def draft_at(batch: Any, logit: Tensor) -> Tensor:
    """The input tokens at these logits, which are the drafts; anything past the batch is read from its end."""
    places = batch.logits_indices
    return batch.input_ids[places[logit.clamp_max(places.shape[0] - 1)]]


FAULTS = {fault.__name__: fault for fault in (accept_one_more, biased_sampler)}
