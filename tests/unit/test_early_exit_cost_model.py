"""The cost model against brute force and against numbers worked by hand."""

import random

import pytest

from selfspec_cli.early_exit import cost_model as cm


@pytest.mark.parametrize(("a", "k", "want"), [(0, 5, 1), (1, 5, 6), (0.5, 2, 1.75), (0.3, 0, 1)])
def test_expected_tokens_by_hand(a, k, want):
    assert cm.expected_tokens(a, k) == pytest.approx(want)


def test_expected_tokens_is_the_closed_form_and_what_rounds_yield():
    a, k = 0.7, 4
    assert cm.expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    draw = random.Random(0)
    total = 0
    for _ in range(20_000):
        total += 1 + next((i for i in range(k) if draw.random() >= a), k)
    assert total / 20_000 == pytest.approx(cm.expected_tokens(a, k), rel=0.02)


def test_expected_tokens_from_positions():
    assert cm.expected_tokens_from_positions([]) == 1
    assert cm.expected_tokens_from_positions([0.8, 0.5]) == pytest.approx(1 + 0.8 + 0.4)
    assert cm.expected_tokens_from_positions([0.6] * 3) == pytest.approx(cm.expected_tokens(0.6, 3))


def test_round_cost_and_speedup():
    assert cm.round_cost(10, 2, 0.5, 3) == pytest.approx(17.5)
    assert cm.speedup(1.0, 3, 10, 2, 0.5) == pytest.approx(40 / 17.5)
    assert cm.speedup([1.0, 1.0, 1.0, 0.0], 3, 10, 2, 0.5) == pytest.approx(40 / 17.5)
    assert cm.speedup(0.9, 0, 10, 2, 0.5) == 1


def test_best_k_beats_every_other():
    k, best = cm.best_k(0.8, 10, 2, 0.5)
    assert best == pytest.approx(max(cm.speedup(0.8, i, 10, 2, 0.5) for i in range(17)))
    assert cm.speedup(0.8, k, 10, 2, 0.5) == best
    assert 0 < k < 16
    assert cm.best_k(0.1, 10, 2, 0.5) == (0, 1.0)
    assert cm.best_k([0.9, 0.0, 0.9], 10, 2, 0.5)[0] == 1
    assert cm.best_k(1.0, 10, 1, 0)[0] == 16


def test_efficiency():
    assert cm.efficiency(1.5, 2.0) == 0.75
    with pytest.raises(ValueError, match="positive"):
        cm.efficiency(1.5, 0)


def test_break_even_is_where_the_first_step_starts_to_pay():
    p = cm.break_even(10, 2, 0.5)
    assert cm.speedup(p, 1, 10, 2, 0.5) == pytest.approx(1)
    assert cm.speedup(p + 0.01, 1, 10, 2, 0.5) > 1 > cm.speedup(p - 0.01, 1, 10, 2, 0.5)


def test_break_even_at_a_speedup_decides_the_best_k():
    a, costs = 0.8, (10, 2, 0.5)
    k, best = cm.best_k(a, *costs)
    threshold = cm.break_even(*costs, speedup=best)
    assert a**k >= threshold > a ** (k + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cm.expected_tokens(1.1, 2),
        lambda: cm.expected_tokens(float("nan"), 2),
        lambda: cm.expected_tokens(0.5, -1),
        lambda: cm.expected_tokens_from_positions([0.5, -0.1]),
        lambda: cm.round_cost(0, 1, 1, 1),
        lambda: cm.round_cost(1, -1, 1, 1),
        lambda: cm.round_cost(1, 1, 1, -1),
        lambda: cm.speedup([0.5], 2, 10, 1, 1),
        lambda: cm.break_even(10, 1, 1, speedup=0),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError, match=r"given|allowed|positive"):
        call()
