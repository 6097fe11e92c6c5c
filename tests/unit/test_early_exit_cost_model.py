"""The cost model against brute force and against numbers worked by hand."""

from dataclasses import replace

import pytest

from selfspec_cli.early_exit import cost_model as cm
from selfspec_cli.early_exit.cost_model import Costs

MEASURED = Costs(plain=7.0, draft=1.0, verify=7.2, verify_token=0.25)


def costs(plain=10.0, draft=2.5):
    """A verify pass that takes as long as a plain step, whatever it verifies."""
    return Costs(plain, draft, verify=plain)


def test_round_and_speedup_by_hand():
    assert costs().round(3) == pytest.approx(17.5)
    assert costs().speedup(4, 3) == pytest.approx(40 / 17.5)
    assert costs().speedup(1, 0) == 1
    whole = Costs(plain=10, draft=2, verify=11, verify_token=0.25, start=0.5)
    assert whole.round(2.5) == pytest.approx(11 + 0.5 + 2.5 * 2.25)
    # A draft step may come out of noise as negative; a step is never a gain.
    assert replace(whole, draft=-3.0).step == 0.25


def test_bytes_give_what_the_bench_always_predicted():
    """Against the formula written out: tokens a round x full / (full + drafts a round x draft)."""
    read = {"full": 16e9, "full_kv_token": 131_072.0, "draft": 5e9, "draft_kv_token": 32_768.0}
    context = 32 * (32 + 200 / 2)
    full, draft = 16e9 + context * 131_072.0, 5e9 + context * 32_768.0
    assert Costs.from_bytes(read, context).speedup(2.4, 2.9) == pytest.approx(2.4 * full / (full + 2.9 * draft), abs=0)
    assert Costs.from_bytes(read, context, attended=64).draft == 5e9 + 64 * 32_768.0


@pytest.mark.parametrize("start", [0.0, 0.6])
def test_costs_are_found_again(start):
    rounds, costs = 100, Costs(plain=7.0, draft=1.0, verify=7.2, verify_token=0.25, start=start)
    arms = [(k, rounds * costs.round(k), rounds * (start + k * costs.draft), rounds) for k in (1, 4, 8)]
    found = cm.fit_costs(arms, costs.plain)
    for name in ("plain", "draft", "verify", "verify_token", "start"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-9)


@pytest.mark.parametrize("drafting", [(1.0, 8.0), (4.0, 2.0)])
def test_drafting_neither_starts_at_a_gain_nor_gets_cheaper_with_length(drafting):
    found = cm.fit_costs([(1, 10.0, drafting[0], 1), (4, 20.0, drafting[1], 1)], 7.0)
    assert found.start == 0
    assert found.draft == pytest.approx(sum(drafting) / 5)


def test_one_length_says_nothing_of_where_drafting_starts():
    found = cm.fit_costs([(4, 20.0, 8.0, 1)], 7.0)
    assert (found.draft, found.start, found.verify_token, found.verify) == (2.0, 0.0, 0.0, 12.0)


def test_where_drafting_cannot_be_told_apart_a_round_still_costs_the_same():
    arms = [(k, 100 * MEASURED.round(k), None, 100) for k in (1, 4, 8)]
    found = cm.fit_costs(arms, MEASURED.plain)
    assert [found.round(k) for k in (0, 3, 8)] == pytest.approx([MEASURED.round(k) for k in (0, 3, 8)])
    assert found.draft == pytest.approx(MEASURED.draft + MEASURED.verify_token)


@pytest.mark.parametrize(
    "call",
    [
        lambda: costs(plain=0),
        lambda: costs(plain=float("nan")),
        lambda: Costs(1.0, 1.0, 1.0, start=-1.0),
        lambda: costs().round(-1),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError, match=r"given|allowed|positive"):
        call()


@pytest.mark.parametrize("own", [None, 0.05])
def test_a_line_through_noise_leaves_something_for_the_verify_pass(own):
    """The longer round took so much longer that the line through both would cost nothing, or less, without drafts."""
    found = cm.fit_costs([(1, 1.0, own, 1), (4, 16.0, own, 1)], 2.0)
    if own is None:
        assert (found.verify, found.draft) == pytest.approx((2.0, (8.5 - 2.0) / 2.5))
    else:
        assert (found.verify, found.verify_token) == pytest.approx((8.45, 0.0))
    faster = cm.fit_costs([(1, 1.0, None, 1), (4, 16.0, None, 1)], 20.0)  # than a plain step: drafting is free then
    assert (faster.verify, faster.draft) == (8.5, 0.0)
    edge = cm.fit_costs([(1, 1.0, None, 1), (4, 4.0, None, 1)], 2.0)  # a line through nothing
    assert (edge.verify, edge.draft) == pytest.approx((2.0, 0.2))
    fitted = cm.fit_costs([(1, 1.5, 0.5, 1), (4, 4.5, 0.5, 1)], 2.0)
    assert (fitted.verify, fitted.verify_token) == (2.5, 0.0)
