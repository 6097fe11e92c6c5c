"""Thinking budgets on vLLM 0.32's V1 model runner, in rounds with drafts and in steps without.

vLLM lays out the rows of a step as one for each draft wherever the engine speculates. In a step without drafts that is
no row at all, so that one request's budget is carried out on another. It looks at tokens of earlier rounds alone, so
that thinking which ends by itself inside accepted drafts is ended again when the budget runs out. And a request without
a budget that moves into the row of one that has ended is given that one's budget, drafts or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def exact_with_drafts(original: type[Any]) -> type[Any]:
    """A subclass of `ThinkingBudgetStateHolder`: plain decoding's states, token by token, over drafts too."""
    from selfspec_cli.vllm_plugin.vllm_names import process_dict_updates

    class ExactWithDrafts(original):
        """Keeps the state of each request after its committed tokens, as a plain engine has it."""

        def __init__(
            self, reasoning_config: Any, max_num_seqs: int, num_spec_tokens: int, device: Any, is_pin_memory: bool
        ) -> None:
            super().__init__(reasoning_config, max_num_seqs, 0, device, is_pin_memory)
            self._forced: dict[int, list[int | None]] = {}
            markers = self.think_start_token_ids, self.think_end_token_ids
            self._longest = max(map(len, markers))

        def sync_batch(self, batch_update: Any) -> None:
            """Follow requests that come, go and change rows, as vLLM's other processors do."""
            if self.is_enabled:
                process_dict_updates(self._state, batch_update, self._beginning)

        def _beginning(self, params: Any, prompt: list[int] | None, output: list[int]) -> dict[str, Any] | None:
            """The state of a new request; None for one without a budget."""
            budget = params.thinking_token_budget
            return None if budget is None else self._init_state_entry(prompt, budget)

        def update_state(
            self,
            output_token_ids: Sequence[list[int]],
            spec_token_ids: Sequence[list[int]] | None,
            repeat_indices: Tensor | None = None,
        ) -> None:
            """Work out what each request must write at each place of this step.

            output_token_ids: committed tokens by request; spec_token_ids: its drafts.
            """
            if not self.is_enabled:
                return
            self._forced = {}
            for row, state in self._state.items():
                tokens = output_token_ids[row]
                self._move_on(state, tokens)
                drafts = spec_token_ids[row] if spec_token_ids else []
                self._forced[row] = self._over_drafts(state, tokens, drafts)

        def _move_on(self, state: dict[str, Any], tokens: list[int]) -> None:
            """Bring `state` to the end of `tokens` in steps of one token, as plain decoding does."""
            reached = len(state["output_tok_ids"]) if state.get("followed") else 0
            for length in range(min(reached + 1, len(tokens)), len(tokens) + 1):
                # Earlier tokens have been searched for markers in the steps before.
                state["scan_offset"] = max(state["scan_offset"], length - self._longest)
                state |= {"output_tok_ids": tokens[:length], "spec_token_ids": [], "force_index": [], "followed": True}
                self._update_think_state(state)

        def _over_drafts(self, state: dict[str, Any], tokens: list[int], drafts: Sequence[int]) -> list[int | None]:
            """The token that must be written at each place: after each number of drafts, from none to all of them."""
            forced = [self._must_write(state)]
            if not state["in_end"] and state["check_count_down"] > len(drafts) + 1:
                return forced * (len(drafts) + 1)
            state = dict(state)
            for place in range(len(drafts)):
                self._move_on(state, [*tokens, *drafts[: place + 1]])
                forced.append(self._must_write(state))
            return forced

        def _must_write(self, state: dict[str, Any]) -> int | None:
            if not (state["in_end"] and state["force_index"] and state["end_count"] < len(self.think_end_token_ids)):
                return None
            return int(self.think_end_token_ids[state["end_count"]])

        def apply_to_logits(
            self, logits: Tensor, predict_bonus_token: bool, spec_token_ids: Sequence[list[int]] | None
        ) -> Tensor:
            """Force tokens in `logits`, [requests, vocabulary], or [drafts, vocabulary] where drafts are verified."""
            verifies = not predict_bonus_token and any(spec_token_ids or ())
            rows, forced, begin = [], [], 0
            for row in range(max(self._state, default=-1) + 1):
                places = self._forced.get(row, [])
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
