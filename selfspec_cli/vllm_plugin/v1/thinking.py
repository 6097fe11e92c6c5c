"""Thinking budgets on vLLM 0.32's V1 model runner, in rounds with drafts and in steps without.

vLLM lays out the rows of a step as one for each draft wherever the engine speculates. In a step without drafts that is
no row at all, so that one request's budget is carried out on another. It looks at tokens of earlier rounds alone, so
that thinking which ends by itself inside accepted drafts is ended again when the budget runs out. And a request without
a budget that moves into the row of one that has ended is given that one's budget, drafts or not.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORCED = 1e9  # vLLM's: the logit of a token that is forced


def count_drafts(original: Callable[..., None]) -> Callable[..., None]:
    """Override of the V1 runner's `initialize_kv_cache`, after which its batch is the one that serves requests."""

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        batch = self.input_batch
        theirs = batch.thinking_budget_state_holder
        if theirs is not None:
            kind, config = exact_with_drafts(type(theirs)), self.vllm_config.reasoning_config
            ours = kind(config, batch.max_num_reqs, 0, self.device, False)
            batch.thinking_budget_state_holder = batch.sampling_metadata.thinking_budget_state_holder = ours

    return initialize_kv_cache


@dataclass
class Followed:
    """A request with a budget. holder: vLLM's, of this request alone and without drafts; reached: tokens of its output
    that the holder has seen."""

    holder: Any
    budget: int
    prompt: int
    reached: int = 0

    def move_on(self, tokens: list[int]) -> None:
        """Show the holder `tokens`, all of the output, in steps of one token, as plain decoding does."""
        for length in range(min(self.reached + 1, len(tokens)), len(tokens) + 1):
            self.holder.update_state([tokens[:length]], [[]])
        self.reached = len(tokens)

    def must_write(self) -> int | None:
        """The token that must come next; None where it may be any."""
        logits = torch.zeros(1, 1 + max(self.holder.think_end_token_ids, default=0), device=self.holder.device)
        highest = self.holder.apply_to_logits(logits, False, [[]]).max(-1)
        return int(highest.indices) if float(highest.values) >= FORCED else None

    def over_drafts(self, tokens: list[int], drafts: Sequence[int]) -> list[int | None]:
        """The token that must be written at each place: after each number of drafts, from none to all of them."""
        if self.budget > self.prompt + len(tokens) + len(drafts) + 1:
            return [None] * (len(drafts) + 1)  # not even a request that has only thought is at its end
        forced, ahead = [self.must_write()], copy.deepcopy(self)
        for place in range(len(drafts)):
            ahead.move_on([*tokens, *drafts[: place + 1]])
            forced.append(ahead.must_write())
        return forced


def exact_with_drafts(original: type[Any]) -> type[Any]:
    """A subclass of `ThinkingBudgetStateHolder`: plain decoding's states, token by token, over drafts too."""
    from selfspec_cli.vllm_plugin.vllm_names import BatchUpdate, process_dict_updates

    class ExactWithDrafts(original):
        """Follows each request with a holder of vLLM's own, as a plain engine has it."""

        def __init__(
            self, reasoning_config: Any, max_num_seqs: int, num_spec_tokens: int, device: Any, is_pin_memory: bool
        ) -> None:
            super().__init__(reasoning_config, max_num_seqs, 0, device, is_pin_memory)
            self.alone = lambda: original(reasoning_config, 1, 0, device, is_pin_memory)
            self.followed: dict[int, Followed] = {}
            self.forced: dict[int, list[int | None]] = {}

        def has_tracked_requests(self) -> bool:
            """Whether any request has a budget."""
            return bool(self.followed)

        def sync_batch(self, batch_update: Any) -> None:
            """Follow requests that come, go and change rows, as vLLM's other processors do."""
            if self.is_enabled:
                process_dict_updates(self.followed, batch_update, self.beginning)

        def beginning(self, params: Any, prompt: list[int] | None, output: list[int]) -> Followed | None:
            """A new request; None for one without a budget."""
            budget = params.thinking_token_budget
            if budget is None:
                return None
            holder = self.alone()
            holder.sync_batch(BatchUpdate(batch_size=1, removed=[], added=[(0, params, prompt, [])], moved=[]))
            return Followed(holder, budget, len(prompt or ()))

        def update_state(
            self,
            output_token_ids: Sequence[list[int]],
            spec_token_ids: Sequence[list[int]] | None,
            repeat_indices: Tensor | None = None,
        ) -> None:
            """Work out what each request must write at each place of this step.

            output_token_ids: committed tokens by request; spec_token_ids: its drafts.
            """
            self.forced = {}
            for row, one in self.followed.items():
                tokens = output_token_ids[row]
                one.move_on(tokens)
                self.forced[row] = one.over_drafts(tokens, spec_token_ids[row] if spec_token_ids else [])

        def apply_to_logits(
            self, logits: Tensor, predict_bonus_token: bool, spec_token_ids: Sequence[list[int]] | None
        ) -> Tensor:
            """Force tokens in `logits`, [requests, vocabulary], or [drafts, vocabulary] where drafts are verified."""
            verifies = not predict_bonus_token and any(spec_token_ids or ())
            rows, forced, begin = [], [], 0
            for row in range(max(self.followed, default=-1) + 1):
                places = self.forced.get(row, [])
                drafts = len(spec_token_ids[row]) if verifies and spec_token_ids else 0
                at = range(begin, begin + drafts) if verifies else [row]
                written = places[:drafts] if verifies else places[-1:]
                for place, token in zip(at, written, strict=False):
                    if token is not None:
                        rows.append(place)
                        forced.append(token)
                begin += drafts
            if rows:
                logits[torch.tensor(rows, device=logits.device), torch.tensor(forced, device=logits.device)] = FORCED
            return logits

    return ExactWithDrafts
