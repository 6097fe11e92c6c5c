"""How far a draft's own confidence can be trusted: what is counted, and what fades."""

from __future__ import annotations

import pytest
import torch

from selfspec_cli.early_exit.confidence import (
    BINS,
    FIRST_TRIALS,
    MEMORY,
    bins_of,
    first_counts,
    learnt,
    rates,
    usual,
)
from selfspec_cli.early_exit.rule import FIRST_RATE


def test_the_first_guess_is_that_acceptance_exceeds_confidence():
    guess = rates(first_counts())
    middles = (torch.arange(BINS) + 0.5) / BINS
    torch.testing.assert_close(guess, middles**0.25)
    assert float(guess.mean()) == pytest.approx(FIRST_RATE, abs=0.005)
    assert (guess >= middles).all() and (guess < 1).all()
    assert float(usual(first_counts())) == pytest.approx(float(guess.mean()))


def test_every_confidence_has_a_bin():
    confidence = torch.tensor([0.0, 1 / BINS - 1e-6, 1 / BINS, 0.5, 1 - 1e-6, 1.0])
    assert bins_of(confidence).tolist() == [0, 0, 1, BINS // 2, BINS - 1, BINS - 1]


def test_what_was_judged_counts_in_its_own_bin_alone():
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.1])
    counts = learnt(first_counts(), confidence, torch.tensor([True, False, True, False]))
    change = counts - first_counts()
    high, low = bins_of(torch.tensor([0.9, 0.1])).tolist()
    assert (float(change[0, high]), float(change[1, high])) == (2, 3)
    assert (float(change[0, low]), float(change[1, low])) == (0, 1)
    change[:, [high, low]] = 0
    assert not change.any()


def test_acceptance_is_found_whatever_it_is_and_what_is_long_ago_fades():
    draw = torch.Generator().manual_seed(0)
    counts = first_counts()
    for rate in (0.3, 0.9):
        for _ in range(200):
            stood = torch.rand(50, generator=draw) < rate
            counts = learnt(counts, torch.full((50,), 0.6), stood)
        assert float(rates(counts)[bins_of(torch.tensor(0.6))]) == pytest.approx(rate, abs=0.05)
        assert float(counts[1].sum()) < MEMORY + BINS * FIRST_TRIALS + 50


def test_the_first_guess_never_fades_so_that_a_bin_that_is_never_seen_keeps_it():
    counts = first_counts()
    for _ in range(500):
        counts = learnt(counts, torch.full((50,), 0.99), torch.ones(50, dtype=torch.bool))
    torch.testing.assert_close(counts[:, 0], first_counts()[:, 0])
    assert (counts >= first_counts()).all()
