"""Thinking budgets on vLLM 0.32's V1 model runner, in an engine that drafts.

vLLM lays out the rows of a step as one for each draft wherever the engine speculates. In a step without drafts that is
no row at all, so that one request's budget is carried out on another. It looks at tokens of earlier steps alone, so
that thinking which ends by itself inside accepted drafts is ended again when the budget runs out. And a request without
a budget that moves into the row of one that has ended is given that one's budget, drafts or not.

So requests with a budget are not drafted for (`processors.not_to_draft`), and each has vLLM's own states for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.wrap import around


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
