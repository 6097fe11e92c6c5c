"""Thinking budgets beside requests with drafts, against vLLM's own states of a plain engine; starts no engine."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample import thinking_budget_state
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from selfspec_cli.vllm_plugin.v1.processors import Budgets

pytestmark = pytest.mark.contract

VOCAB, THINKS, ENDS = 8, [6], [7, 5]
LENGTH = 40


def holders(ends=ENDS):
    """(ours, vLLM's own of a plain engine) for four requests."""
    config = SimpleNamespace(reasoning_start_token_ids=THINKS, reasoning_end_token_ids=ends)

    def theirs(requests=1):
        return thinking_budget_state.ThinkingBudgetStateHolder(config, requests, 0, torch.device("cpu"), False)

    return Budgets(theirs), theirs(4)


def update(added=(), removed=(), moved=()):
    return BatchUpdate(batch_size=4, removed=list(removed), added=list(added), moved=list(moved))


def request(budget):
    return SimpleNamespace(thinking_token_budget=budget)


def forced(logits):
    """Row -> the token that is forced there."""
    return dict(logits.gt(1e8).nonzero().tolist())


def plain(prompt, budget, draw, ends=ENDS):
    """A text of LENGTH tokens, random where nothing is forced, by vLLM's own states, a token a step."""
    _, theirs = holders(ends)
    written: list[int] = []
    theirs.sync_batch(update([(0, request(budget), prompt, written)]))
    for _ in range(LENGTH):
        theirs.update_state([written], [[]])
        must = forced(theirs.apply_to_logits(torch.zeros(1, VOCAB), False, [[]]))
        written.append(must.get(0, draw.choice([0, 1, 2, 3, *THINKS, *ends])))
    return written


@pytest.mark.parametrize("ends", [ENDS, [7]], ids=["two tokens", "one token"])
@pytest.mark.parametrize("seed", range(12))
def test_each_token_is_forced_as_plain_decoding_forces_it(seed, ends):
    """Row 0 has no budget, and in some steps it has drafts; requests in rows 1 and 2 have budgets."""
    draw = random.Random(seed)
    prompts = [[1, *THINKS] if draw.random() < 0.6 else [1, 2], [2, *THINKS, 3]]
    budgets = [draw.randrange(10), draw.randrange(10)]
    texts = [plain(*pair, draw, ends) for pair in zip(prompts, budgets, strict=True)]
    must = [in_plain(prompt, budget, text, ends) for prompt, budget, text in zip(prompts, budgets, texts, strict=True)]
    ours, _ = holders(ends)
    ours.sync_batch(update([(1 + row, request(budgets[row]), prompts[row], []) for row in range(2)]))
    for at in range(LENGTH):
        drafts = [[4] * draw.randrange(3), [], []]
        ours.update_state([[0] * at, *(text[:at] for text in texts)], drafts)
        rows = ours.apply_to_logits(torch.zeros(3, VOCAB), any(drafts), drafts)
        assert forced(rows) == {1 + row: tokens[at] for row, tokens in enumerate(must) if tokens[at] is not None}
        if drafts[0]:
            assert not forced(ours.apply_to_logits(torch.zeros(len(drafts[0]), VOCAB), False, drafts))


def in_plain(prompt, budget, text, ends):
    """What plain decoding forces at each place of its text; None where it may write anything."""
    _, theirs = holders(ends)
    written: list[int] = []
    theirs.sync_batch(update([(0, request(budget), prompt, written)]))
    found = []
    for token in text:
        theirs.update_state([written], [[]])
        found.append(forced(theirs.apply_to_logits(torch.zeros(1, VOCAB), False, [[]])).get(0))
        written.append(token)
    return found


def test_a_request_that_moves_into_the_row_of_another_does_not_get_its_budget():
    ours, theirs = holders([7])
    for holder in (ours, theirs):
        written = [[0] for _ in range(3)]
        asked = [(row, request(budget), [1, *THINKS], written[row]) for row, budget in enumerate((0, 9, None))]
        holder.sync_batch(update(asked))
        # Request 0 has ended, and 2 takes its row; vLLM does not list a row as removed that is filled at once.
        holder.sync_batch(update(moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
        assert set(holder.followed if holder is ours else holder._state) == ({1} if holder is ours else {0, 1})
    followed = ours.followed[1]
    ours.sync_batch(update(moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert ours.followed == {0: followed}


def test_a_request_that_comes_back_goes_on_where_it_was():
    """After a preemption it is added with all tokens that it has."""
    draw = random.Random(3)
    text = plain([1, *THINKS], 6, draw, [7])
    must = in_plain([1, *THINKS], 6, text, [7])
    for at in range(1, LENGTH):
        ours, _ = holders([7])
        ours.sync_batch(update([(0, request(6), [1, *THINKS], text[:at])]))
        ours.update_state([text[:at]], [[]])
        assert forced(ours.apply_to_logits(torch.zeros(1, VOCAB), False, [[]])).get(0) == must[at]
