"""Thinking budgets in rounds with drafts, against vLLM's own states of an engine without any; starts no engine."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample import thinking_budget_state
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from selfspec_cli.vllm_plugin.v1.thinking import exact_with_drafts

pytestmark = pytest.mark.contract

VOCAB, THINKS, ENDS = 8, [6], [7, 5]
LENGTH = 40


def holders(ends=ENDS):
    """(ours, vLLM's own of a plain engine) for four requests."""
    theirs = thinking_budget_state.ThinkingBudgetStateHolder
    if theirs.__module__.startswith("selfspec_cli"):  # another test's engine has replaced it
        theirs = theirs.__mro__[1]
    config = SimpleNamespace(reasoning_start_token_ids=THINKS, reasoning_end_token_ids=ends)
    return [
        kind(config, 4, drafts, torch.device("cpu"), False)
        for kind, drafts in ((exact_with_drafts(theirs), 3), (theirs, 0))
    ]


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
def test_each_place_of_a_round_is_forced_as_plain_decoding_forces_it(seed, ends):
    """Two requests at once, of which one drafts in this round and one may not; drafts are right, or wrong from a place
    on, and what is right is accepted."""
    draw = random.Random(seed)
    prompts = [[1, *THINKS] if draw.random() < 0.6 else [1, 2], [2, *THINKS, 3]]
    budgets = [draw.randrange(10), draw.randrange(10)]
    texts = [plain(*pair, draw, ends) for pair in zip(prompts, budgets, strict=True)]
    must = [in_plain(prompt, budget, text, ends) for prompt, budget, text in zip(prompts, budgets, texts, strict=True)]
    ours, _ = holders(ends)
    written: list[list[int]] = [[], []]
    ours.sync_batch(update([(row, request(budgets[row]), prompts[row], written[row]) for row in range(2)]))
    while max(map(len, written)) < LENGTH - 4:
        drafts = []
        for row in range(2):
            right = texts[row][len(written[row]) : len(written[row]) + draw.randrange(4)]
            wrong = draw.randrange(len(right) + 1)
            drafts.append([token if place < wrong else 4 for place, token in enumerate(right)])
        rows = torch.zeros(2, VOCAB)
        ours.update_state(written, drafts)
        last = forced(ours.apply_to_logits(rows.clone(), any(drafts), drafts))
        places = (
            forced(ours.apply_to_logits(torch.zeros(sum(map(len, drafts)), VOCAB), False, drafts))
            if any(drafts)
            else {}
        )
        begin = 0
        for row, own in enumerate(drafts):
            at, right = len(written[row]), 0
            while right < len(own) and own[right] == texts[row][at + right]:
                right += 1
            for place in range(min(right + 1, len(own))):  # those after a wrong draft do not matter
                assert places.get(begin + place) == must[row][at + place], (row, at, own)
            if right == len(own):
                assert last.get(row) == must[row][at + right], (row, at, own)
            begin += len(own)
            written[row] += texts[row][at : at + right + 1]


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
    ours.sync_batch(update(moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert set(ours.followed) == {0} and ours.followed[0].budget == 9


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
