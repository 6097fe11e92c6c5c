"""The wager: its arithmetic, and by simulation that it opens for good entries and for bad ones seldom enough."""

import random

import pytest

from selfspec_cli.gateway.cache.promise import CAP, Promise


def opens(chance_wrong: float, audits: int, seed: int, **given) -> bool:
    rng = random.Random(seed)
    promise = Promise(**{"delta": 0.05, "alpha": 0.1, **given})
    for _ in range(audits):
        promise = promise.after(rng.random() >= chance_wrong)
        if promise.open:
            return True
    return False


def test_right_audits_open_it_after_about_three_over_delta():
    promise, audits = Promise(delta=0.01), 0
    while not promise.open:
        promise, audits = promise.after(True), audits + 1
    assert 300 <= audits <= 450
    assert (promise.audits, promise.wrong_audits) == (audits, 0)


def test_a_share_of_wrong_ones_at_delta_opens_it_with_a_chance_of_at_most_alpha():
    # 400 streams of 400 audits, looked at after each: 40 opened are what alpha allows, 60 lie three deviations above.
    assert sum(opens(0.05, 400, seed) for seed in range(400)) <= 60


def test_a_share_well_below_delta_opens_it():
    assert sum(opens(0.005, 400, seed) for seed in range(50)) >= 40


def test_wrong_audits_close_it_again_however_many_right_ones_came_before():
    promise = Promise(delta=0.05)
    for _ in range(5000):
        promise = promise.after(True)
    assert promise.open
    wrong = 0
    while promise.open:
        promise, wrong = promise.after(False), wrong + 1
    assert wrong <= 3 < CAP


def test_the_factor_has_a_mean_of_at_most_one_under_the_hypothesis():
    promise = Promise(delta=0.05)
    for right in [True] * 100 + [False] * 3:
        promise = promise.after(right)
    assert 0 < promise.bet <= promise.delta
    for chance in (0.05, 0.1, 0.9):
        mean = chance * promise.bet / 0.05 + (1 - chance) * (1 - promise.bet) / 0.95
        assert mean <= 1 + 1e-12


def test_a_complaint_lowers_it_and_is_no_audit():
    promise = Promise(delta=0.05)
    for _ in range(200):
        promise = promise.after(True)
    worse = promise.after_complaint()
    assert worse.log_e < promise.log_e
    assert (worse.audits, worse.wrong_audits) == (promise.audits, promise.wrong_audits)


@pytest.mark.parametrize("given", [{"delta": 0}, {"delta": 1.5}, {"delta": 0.1, "alpha": 0}])
def test_a_share_that_is_none_is_refused_by_name(given):
    with pytest.raises(ValueError, match="allowed is a number between 0 and 1"):
        Promise(**given)
