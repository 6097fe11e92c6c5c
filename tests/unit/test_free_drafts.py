"""The rule of free drafts: the longest match, what follows it, when it is trusted, and how drafts go on from it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import rates as shares

from selfspec_cli.early_exit.free_drafts import (
    LONGEST,
    Matches,
    agreement,
    expected,
    first_rates,
    following,
    learnt,
    longest_match,
    trusted_from,
)

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def slowly(text: list[int]) -> tuple[int, int]:
    """The longest match by trying all places."""
    best = (0, 0)
    for start in range(1, len(text)):
        length = 0
        while length < min(LONGEST, start) and text[start - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, (length, start)) if length else best
    return best


@given(TEXTS)
def test_the_match_is_the_longest_and_of_these_the_latest(text):
    assert longest_match(torch.tensor(text)) == slowly(text)


@given(TEXTS, st.integers(1, 40))
def test_what_follows_a_match_goes_on_as_it_would_if_it_came_true(text, count):
    """Drafted one token after the other, each taken for true, a draft is the same."""
    length, start = longest_match(torch.tensor(text))
    if not length:
        return
    draft = following(torch.tensor(text), start, count).tolist()
    grown = text + draft
    assert draft == [grown[start + place] for place in range(count)]
    assert agreement(torch.tensor(grown), len(text), start) == count
    wrong = torch.tensor([*grown[:-1], 9])
    assert agreement(wrong, len(text), start) == count - 1


@given(st.integers(1, LONGEST), st.lists(st.booleans(), max_size=40))
def test_a_match_teaches_what_its_tokens_would_teach_one_by_one(length, came_true):
    """But for the longest, whose tokens of one round count together."""
    agreed = next((place for place, right in enumerate(came_true) if not right), len(came_true))
    rates = learnt(first_rates(), length, agreed, len(came_true))
    one_by_one = first_rates()
    for place in range(min(agreed + 1, len(came_true))):
        one_by_one = learnt(one_by_one, min(length + place, LONGEST), int(place < agreed), 1)
    assert ((rates > 0) & (rates < 1)).all()
    torch.testing.assert_close(rates[:-1], one_by_one[:-1])
    if agreed == len(came_true):
        assert rates[-1] >= first_rates()[-1]


@given(
    st.lists(st.floats(0.01, 0.99), min_size=LONGEST, max_size=LONGEST),
    shares,
    st.integers(1, 20),
    st.integers(1, 8),
    st.floats(0.01, 1.5),
)
def test_a_match_is_trusted_from_where_it_yields_more_in_the_same_time(rates, own, tokens, k, cost):
    rates = torch.tensor(rates)
    yields = expected(rates, tokens)
    assert ((yields >= 0) & (yields <= tokens)).all()
    plain, stands = 0.0, 1.0
    for place in range(tokens):
        stands *= float(rates[min(3 + place, LONGEST) - 1])
        plain += stands
    assert float(yields[2]) == pytest.approx(plain, rel=1e-4)
    trusted = trusted_from(rates, own, tokens, k, cost)
    of_its_own = 1 + sum(own**place for place in range(1, k + 1))
    for length in range(trusted, LONGEST + 1):
        assert (1 + float(yields[length - 1])) * (1 + cost * k) >= of_its_own - 1e-3
    # A cheaper draft of its own asks for a longer match.
    assert trusted_from(rates, own, tokens, k, cost / 2) >= trusted
    assert trusted_from(rates, own / 2, tokens, k, cost) <= trusted


def test_a_step_that_many_requests_share_is_no_reason_to_copy():
    seldom_right = torch.full((LONGEST,), 0.4)
    assert trusted_from(seldom_right, own=0.9, tokens=12, k=8, cost=0.6) == 1
    assert trusted_from(seldom_right, own=0.9, tokens=12, k=8, cost=0.6 / 64) == LONGEST + 1


COST = 0.25
"""Of a draft step, in plain steps."""


def rounds(matches: Matches, truth: list[int], begin: int, own: int | None) -> list[tuple[int, int, int]]:
    """Draft for `truth` from `begin` tokens on. own: what the model's own draft always says; None: what is true.
    Returns (own, copied, accepted) of each round."""
    text, found = truth[:begin], []
    while len(text) < len(truth) - matches.tokens - 2:
        tokens, draft = torch.tensor(text), []
        matches.look_up(tokens, COST, matches.tokens, matches.k)
        while True:
            matches.drafted = len(draft)
            rest = matches.rest(tokens, draft, matches.tokens)
            matches.copied = len(rest)
            if rest or len(draft) == matches.k:
                draft += rest
                break
            draft.append(truth[len(text) + len(draft)] if own is None else own)
        after = truth[len(text) : len(text) + len(draft)]
        accepted = next((n for n, pair in enumerate(zip(draft, after, strict=True)) if pair[0] != pair[1]), len(draft))
        found.append((matches.drafted, matches.copied, accepted))
        text = truth[: len(text) + accepted + 1]
        matches.verdict(torch.tensor(text), accepted)
    return found


def test_what_repeats_is_copied_and_what_does_not_is_soon_left_to_the_model():
    repeated = list(range(50)) * 4
    found = rounds(Matches(16, 4), repeated, 60, own=99)
    assert found == [(0, 16, 16)] * len(found) and len(found) > 5
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 4, (400,), generator=draw).tolist()
    matches = Matches(16, 4)
    found = rounds(matches, noise, 20, own=None)
    assert matches.rates[1] < 0.5 and matches.own > 0.9
    assert found[-20:].count((4, 0, 4)) > 10
