"""The running estimate of acceptance, the ladder of lengths, and when drafts are left out and tried again."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from selfspec_cli.early_exit.acceptance import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    NEVER,
    USUAL_WEIGHT,
    WEIGHT,
    BatchSwitch,
    Ladder,
    Probing,
    RequestEstimate,
)
from selfspec_cli.early_exit.cost_model import expected_tokens
from selfspec_cli.early_exit.estimate import clamped, reached, trials, updated

COST = 0.2


def stood(draw: random.Random, rate: float, length: int) -> int:
    """How many of `length` drafts are accepted, each with probability `rate` given those before it."""
    return next((n for n in range(length) if draw.random() >= rate), length)


def test_what_was_never_judged_teaches_nothing():
    assert [trials(n, 4) for n in range(5)] == [1, 2, 3, 4, 4]
    assert updated(0.7, 0, 0, WEIGHT) == 0.7


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("length", [1, 4, 12])
def test_the_estimate_comes_to_the_acceptance_whatever_the_length(rate, length):
    draw, estimate, seen = random.Random(1), 1.0, []
    for number in range(6000):
        accepted = stood(draw, rate, length)
        estimate = updated(estimate, accepted, trials(accepted, length), WEIGHT)
        seen += [estimate] * (number > 100)
    assert sum(seen) / len(seen) == pytest.approx(rate, abs=0.06)


def test_the_same_functions_take_tensors():
    accepted, drafted = torch.tensor([0, 2, 4]), torch.tensor([4, 4, 4])
    assert trials(accepted, drafted).tolist() == [1, 3, 4]
    assert clamped(torch.tensor([0, 5, 2]), torch.tensor([1, 1, 1]), torch.tensor([3, 3, 3])).tolist() == [1, 3, 2]
    assert reached(torch.tensor([1, 1]), torch.tensor([0.2, 0.4]), 0.3).tolist() == [1, 2]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("cost", [0.05, COST, 0.6])
def test_a_level_is_the_length_that_pays_best_but_for_its_hysteresis(k, cost):
    ladder = Ladder.of(k, cost)
    assert ladder.lengths[0] == 1
    assert ladder.lengths[-1] == k
    assert list(ladder.rises) == sorted(ladder.rises)
    for rate in [n / 200 for n in range(200)]:
        if any(fall <= rate < rise for fall, rise in zip(ladder.falls, ladder.rises, strict=True)):
            continue
        best = max((0, *ladder.lengths), key=lambda k: expected_tokens(rate, k) / (1 + cost * k))
        for current in range(len(ladder.lengths) + 1):
            assert ladder.length(ladder.level(rate, current)) == best


def test_between_the_two_thresholds_a_request_stays_where_it_is():
    ladder = Ladder.of(4, COST)
    for level in range(1, len(ladder.lengths) + 1):
        rate = (ladder.rises[level - 1] + ladder.falls[level - 1]) / 2
        assert ladder.level(rate, level) == level
        assert ladder.level(rate, level - 1) == level - 1


@pytest.mark.parametrize("cost", [0.05, COST, 0.6, 0.9])
def test_a_request_whose_drafts_are_all_accepted_climbs_to_the_longest(cost):
    ladder = Ladder.of(12, cost)
    assert ladder.level(1.0, 0) == len(ladder.lengths)


def test_a_draft_that_costs_a_plain_step_never_pays():
    ladder = Ladder.of(4, 1.0)
    assert ladder.rises == (NEVER,) * 3
    assert ladder.level(1.0, 3) == 0


def test_trials_are_rarer_the_more_fail_and_frequent_after_one_that_does_not():
    probing, rounds = Probing(), []
    for number in range(4000):
        if probing.due():
            rounds.append(number)
            probing.ended(False)
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    assert rounds[0] == FIRST_PAUSE
    assert gaps[:3] == [2 * FIRST_PAUSE + 1, 4 * FIRST_PAUSE + 1, 8 * FIRST_PAUSE + 1]
    assert max(gaps) == LONGEST_PAUSE + 1
    probing.ended(True)
    assert probing.due()


# ---- one request -----------------------------------------------------------------------------------------------------


def decode(rate, rounds, usual=1.0, seed=0, k=8):
    """Time over plain decoding of a request whose drafts are accepted at `rate`, by number of tokens."""
    draw, estimate = random.Random(seed), RequestEstimate.beginning(Ladder.of(k, COST), usual)
    time = tokens = 0.0
    lengths = []
    for number in range(rounds):
        length = estimate.length()
        accepted = stood(draw, rate(number) if callable(rate) else rate, length)
        if length:
            estimate.verdict(accepted, length)
        time, tokens = time + 1 + COST * length, tokens + 1 + accepted
        lengths.append(length)
    return time / tokens, lengths


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_a_request_whose_drafts_are_not_accepted_is_as_fast_as_plain(rate):
    slowdown, lengths = decode(rate, 2000)
    assert slowdown < 1.02
    assert lengths[0] == 8
    assert lengths.count(0) > 1900


def test_near_the_break_even_a_request_may_lose_the_little_that_drafts_gain_but_no_more():
    assert decode(0.3, 4000)[0] < 1.02


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9, 0.97])
def test_a_request_is_nearly_as_fast_as_at_its_best_length(rate):
    best = min((1 + COST * k) / expected_tokens(rate, k) for k in range(9))
    slowdown, _ = decode(rate, 4000)
    assert slowdown < 1.06 * best


def test_drafts_come_back_when_they_are_accepted_again():
    _, lengths = decode(lambda number: 0.9 if number > 600 else 0.0, 2000)
    assert lengths[500:600].count(0) > 90
    assert lengths[-200:].count(0) == 0
    assert max(lengths[-200:]) >= 4


def test_a_request_begins_with_what_is_usual():
    assert decode(0.0, 1, usual=0.1)[1] == [0]
    assert decode(0.0, 1, usual=1.0)[1] == [8]


# ---- a whole batch ---------------------------------------------------------------------------------------------------


def run_batch(switch, rates, rounds, width=4, cost=None, names=None):
    """Rounds in which a batch was drafted for; each request drafts one token, whose verdict comes a round later."""
    draw, answers, pending = random.Random(0), [], []
    names = names or [f"r{number}" for number in range(len(rates))]
    for _ in range(rounds):
        late, pending = pending, []
        opened = switch.open(names, width, cost)
        answers.append(opened)
        for name, accepted in late:
            switch.verdict(name, accepted)
        if opened:
            pending = [(name, stood(draw, rate, 1)) for name, rate in zip(names, rates, strict=True)]
    return answers


def test_a_batch_without_acceptance_goes_without_drafts_and_tries_rarely():
    answers = run_batch(BatchSwitch(COST), [0.0] * 8, 2000)
    assert answers[0]
    assert sum(answers[:60]) < 20
    assert sum(answers[1000:]) <= 3


def test_one_good_request_does_not_hold_up_many_bad_ones_and_many_good_ones_go_on():
    assert sum(run_batch(BatchSwitch(COST), [0.9] + [0.0] * 15, 500)[100:]) < 20
    assert all(run_batch(BatchSwitch(COST), [0.0] + [0.9] * 15, 500))


def test_the_cost_of_verifying_at_a_load_counts():
    assert all(run_batch(BatchSwitch(COST), [0.7] * 8, 300))
    answers = run_batch(BatchSwitch(COST), [0.7] * 8, 300, cost=4 * COST + 0.8)
    assert not any(answers[-10:])
    assert sum(answers) < 60


def test_a_batch_comes_back_when_its_drafts_are_accepted_again():
    switch = BatchSwitch(COST)
    run_batch(switch, [0.0] * 4, 300)
    assert not switch.on
    run_batch(switch, [0.95] * 4, 300)
    assert switch.on


def test_new_requests_count_as_what_is_usual_and_do_not_open_by_themselves():
    switch, opened = BatchSwitch(COST), 0
    for number in range(100):  # requests that come and go, each after ten rounds
        names = [f"r{number}-{place}" for place in range(4)]
        opened += sum(run_batch(switch, [0.0] * 4, 10, names=names))
        switch.forget(names)
    assert opened < 60
    assert len(switch._gained) == 0


def test_what_is_usual_forgets_more_slowly_than_a_request():
    assert 0 < USUAL_WEIGHT < WEIGHT < 1


def test_a_trial_of_a_request_is_one_token_long():
    ladder = Ladder.of(8, COST)
    estimate = RequestEstimate(ladder, 0.0, 0)
    assert [estimate.length() for _ in range(FIRST_PAUSE + 1)] == [0] * FIRST_PAUSE + [1]


def test_a_switch_begins_on_and_stays_where_drafts_pay_as_much_as_they_cost():
    switch = BatchSwitch(0.5)
    assert switch.open(["a"], 4, None)  # it counts on one token, and two drafts cost a step
    switch.on = False
    assert not switch.open(["a"], 4, None)  # to begin again takes more


def test_a_request_of_the_batch_counts_by_its_own_drafts():
    switch = BatchSwitch(0.87)
    for _ in range(30):
        switch.verdict("a", 4)
    assert switch.open(["a"], 10, None)
    assert not BatchSwitch(0.87).open(["a"], 10, None)


def test_a_request_that_was_never_seen_counts_as_what_is_usual_beside_others():
    assert not BatchSwitch(0.7).open(["new"], 10, None)
    switch = BatchSwitch(0.7)
    for _ in range(30):
        switch.verdict("a", 4)
    switch.verdict("b", 0)
    switch.forget(["a"])
    assert switch.open(["new"], 10, None)


def test_a_trial_that_pays_is_followed_by_another():
    switch = BatchSwitch(0.5)
    for _ in range(40):
        switch.verdict("a", 0)
    assert [switch.open(["a"], 4, None) for _ in range(FIRST_PAUSE + 1)] == [False] * FIRST_PAUSE + [True]
    switch.verdict("a", 1)  # as much as it cost
    assert switch.open(["a"], 4, None)
    switch.verdict("a", 0)
    assert not any(switch.open(["a"], 4, None) for _ in range(2 * FIRST_PAUSE))
    assert switch.open(["a"], 4, None)


def test_a_late_verdict_is_no_trial():
    """On CUDA a round's verdict may arrive when the next round has begun."""
    switch = BatchSwitch(0.5)

    def rounds(gained: int, until: bool) -> None:
        for _ in range(200):
            switch.verdict("a", gained)
            switch.open(["a"], 4, None)
            if switch.on == until:
                return
        raise AssertionError("the switch did not move")

    rounds(0, False)
    while not switch.open(["a"], 4, None):
        pass  # the first trial
    rounds(4, True)
    rounds(0, False)
    switch.verdict("a", 0)  # of the last round that was drafted for
    assert any(switch.open(["a"], 4, None) for _ in range(FIRST_PAUSE))
