"""A draft that is silently broken is noticed by its acceptance, and one that is only weak is not."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from selfspec_cli.early_exit.broken_draft import LEAST_OF_COPIES, LEAST_OF_LAYERS, at_most, look


@pytest.mark.parametrize(
    ("judged", "accepted", "chance"), [(39, 0, 0.3), (200, 30, 0.3), (684, 0, 0.02), (50, 50, 0.5)]
)
def test_the_probability_is_the_binomial_distributions(judged, accepted, chance):
    assert at_most(accepted, judged, chance) == pytest.approx(stats.binom.cdf(accepted, judged, chance))


@pytest.mark.parametrize(("copies", "enough"), [(True, 39), (False, 684)])
def test_nothing_accepted_is_given_up_once_it_is_certain(copies, enough):
    assert look(enough - 1, 0, copies).warning is None
    found = look(enough, 0, copies)
    assert found.gives_up and f"only 0 of {enough}" in found.warning and "nothing more is drafted" in found.warning
    assert not look(0, 0, copies).gives_up


def test_little_accepted_is_a_warning_and_no_end_of_drafting():
    found = look(200, 12, copies_all_layers=True)  # 6 %, where 8-bit copies have 98 %
    assert found.warning is not None and not found.gives_up and "12 of 200" in found.warning
    assert look(200, 12, copies_all_layers=False).warning is None


@pytest.mark.parametrize(("copies", "least"), [(True, LEAST_OF_COPIES), (False, LEAST_OF_LAYERS)])
def test_a_draft_as_weak_as_right_ones_are_is_never_called_broken(copies, least):
    draw = random.Random(0)
    for _ in range(20):
        accepted = 0
        for judged in range(1, 1001):
            accepted += draw.random() < 1.2 * least
            assert look(judged, accepted, copies).warning is None
