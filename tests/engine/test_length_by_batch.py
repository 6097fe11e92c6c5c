"""vLLM's schedule of draft lengths by batch size: followed in every step, and lossless."""

from __future__ import annotations

from typing import Any

import pytest
from harness import differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB

pytestmark = pytest.mark.engine

K = 6
SCHEDULE = [[1, 2, K], [3, 4, 2], [5, 8, 0]]
BY_BATCH_SIZE = [None, K, K, 2, 2, 0, 0, 0, 0]
PROMPTS = ragged_prompts(12, VOCAB, seed=4)


def test_the_draft_length_follows_the_batch_size(model_dir):
    parameters = [greedy(24 + 6 * number) for number in range(len(PROMPTS))]  # the batch shrinks towards the end
    with live(model_dir("llama")) as engine:
        plain = tokens(engine.generate(PROMPTS, parameters))
    rounds: list[tuple[int, int, int]] = []  # requests in the batch, the longest proposal, draft steps taken

    def watch(worker: Any) -> None:
        drafter = worker.model_runner.drafter
        propose = drafter.propose

        def watched(num_speculative_tokens: int, **arguments: Any) -> list[list[int]]:
            before = drafter.counters.steps
            drafts = propose(num_speculative_tokens, **arguments)
            rounds.append((len(drafts), max(map(len, drafts)), drafter.counters.steps - before))
            return drafts

        drafter.propose = watched

    spec = layer_skip(LAYERS // 2, K, num_speculative_tokens_per_batch_size=SCHEDULE)
    with live(model_dir("llama"), spec) as engine:
        engine.llm.collective_rpc(watch)
        assert not differing(tokens(engine.generate(PROMPTS, parameters)), plain)
        engine.counts().require_both_verdicts()
    assert {requests for requests, _, _ in rounds} >= {1, 3, 8}
    for requests, longest, steps in rounds:
        assert longest == steps <= BY_BATCH_SIZE[requests]
    for requests in (1, 3):  # but for steps inside a prefill, the whole length is used
        assert max(longest for size, longest, _ in rounds if size == requests) == BY_BATCH_SIZE[requests]
