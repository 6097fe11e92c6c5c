"""The search for layers to skip, on functions whose best sets are known."""

import itertools

import pytest

from selfspec_cli import interrupts
from selfspec_cli.progress import Progress
from selfspec_cli.stages.views import search

WORTH = {0: 0.9, 1: 0.3, 2: 0.02, 3: 0.05, 4: 0.01, 5: 0.4, 6: 0.07, 7: 0.8}
"""What leaving out a layer costs; together they cost their sum, and two neighbours a little more."""


def agreement(skipped):
    neighbours = sum(1 for layer in skipped if layer + 1 in skipped)
    return max(0.0, 1 - sum(WORTH[layer] for layer in skipped) - 0.04 * neighbours)


def test_each_set_is_the_best_that_grows_out_of_the_one_before():
    steps = list(search(range(8), 4, agreement))
    assert [step.skipped for step in steps] == [(4,), (2, 4), (2, 4, 6), (2, 3, 4, 6)]
    assert [step.agreement for step in steps] == pytest.approx([agreement(step.skipped) for step in steps])
    for step in steps[:3]:  # the small ones are the best of all sets of their size
        best = max(itertools.combinations(range(8), len(step.skipped)), key=agreement)
        assert agreement(best) == pytest.approx(step.agreement)


class Said(Progress):
    def __init__(self):
        self.ends = []

    def ended(self, what, done, total):
        self.ends.append((what, done, total))


def test_few_candidates_are_asked_again():
    asked = []

    def counted(skipped):
        asked.append(skipped)
        return agreement(skipped)

    said = Said()
    steps = list(search(range(8), 4, counted, progress=said))
    assert len(asked) == steps[-1].asked < 8 + 3 * 4
    assert sum(done for _, done, _ in said.ends) == len(asked)  # what was ruled out by its bound is not counted
    assert [total for *_, total in said.ends] == [8, 7, 6, 5]
    assert len(set(asked)) == len(asked)
    assert asked[:8] != sorted(asked[:8])  # the deepest layers come first: they are skipped most easily


def test_a_search_goes_on_from_layers_that_are_skipped_already():
    steps = list(search([0, 1, 2, 3, 5, 6], 2, agreement, start=(4, 7)))
    assert [step.skipped for step in steps] == [(2, 4, 7), (2, 4, 6, 7)]


def test_one_layer_always_stays():
    assert len(list(search(range(3), 9, lambda skipped: 1.0))) == 2
    assert list(search([5], 2, agreement)) == []


def test_an_interrupt_ends_it_between_two_candidates(monkeypatch):
    asked = []
    monkeypatch.setattr(interrupts, "check", lambda: (_ for _ in ()).throw(KeyboardInterrupt) if asked else None)
    with pytest.raises(KeyboardInterrupt):
        list(search(range(8), 4, lambda skipped: asked.append(skipped) or 0.5))
    assert len(asked) == 1
