"""The cost model against brute force and against numbers worked by hand."""

import pytest

from selfspec_cli.early_exit import cost_model as cm
from selfspec_cli.early_exit.cost_model import Costs

MEASURED = Costs(plain=7.0, draft=1.0, verify=7.2, verify_token=0.25)


def costs(plain=10.0, draft=2.0, head=0.5):
    """A verify pass that takes as long as a plain step, whatever it verifies."""
    return Costs(plain, draft, verify=plain, head=head)


def tokens(a, longest=16):
    return {k: cm.expected_tokens(a, k) for k in range(longest + 1)}


def test_efficiency():
    assert cm.efficiency(1.5, 2.0) == 0.75
    with pytest.raises(ValueError, match="positive"):
        cm.efficiency(1.5, 0)


def test_bytes_give_what_the_bench_always_predicted():
    """Against the formula written out: tokens a round x full / (full + drafts a round x draft)."""
    read = {"full": 16e9, "full_kv_token": 131_072.0, "draft": 5e9, "draft_kv_token": 32_768.0}
    context = 32 * (32 + 200 / 2)
    full, draft = 16e9 + context * 131_072.0, 5e9 + context * 32_768.0
    assert Costs.from_bytes(read, context).speedup(2.4, 2.9) == pytest.approx(2.4 * full / (full + 2.9 * draft), abs=0)
    assert Costs.from_bytes(read, context, attended=64).draft == 5e9 + 64 * 32_768.0


def test_step_times_come_back_from_their_own_rounds():
    true = Costs(plain=8.0, draft=0.4, verify=9.0, per_layer=0.25)
    rounds = [(layer, k, true.at(layer, 0.3).round(k)) for layer, k in ((2, 2), (2, 6), (12, 6))]
    assert cm.fit_step_times(8.0, rounds, head=0.3).to_dict() == pytest.approx(true.to_dict())


@pytest.mark.parametrize("rounds", [[], [(2, 2, 1.0), (2, 6, 2.0)], [(2, 2, 1.0), (2, 6, 2.0), (2, 4, 1.5)]])
def test_rounds_that_determine_nothing(rounds):
    words = r"^step times need rounds at two exit layers and at two draft lengths, three at least$"
    with pytest.raises(ValueError, match=words):
        cm.fit_step_times(8.0, rounds, 0.1)


@pytest.mark.parametrize("seconds", [(1.0, 20.0, 21.0), (0.0, 0.0, 0.0)])
def test_rounds_of_noise_are_refused_when_they_are_fitted(seconds):
    rounds = [(layer, k, time) for (layer, k), time in zip([(2, 2), (2, 6), (12, 6)], seconds, strict=True)]
    with pytest.raises(ValueError, match="too noisy"):
        cm.fit_step_times(8.0, rounds, 0.1 if any(seconds) else 0.0)


@pytest.mark.parametrize("start", [0.0, 0.6])
def test_costs_are_found_again(start):
    rounds, costs = 100, Costs(plain=7.0, draft=1.0, verify=7.2, verify_token=0.25, start=start)
    arms = [(k, rounds * costs.round(k), rounds * (start + k * costs.draft), rounds) for k in (1, 4, 8)]
    found = cm.fit_costs(arms, costs.plain)
    for name in ("plain", "draft", "verify", "verify_token", "start"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-9)


def test_one_length_says_nothing_of_where_drafting_starts():
    found = cm.fit_costs([(4, 20.0, 8.0, 1)], 7.0)
    assert (found.draft, found.start, found.verify_token, found.verify) == (2.0, 0.0, 0.0, 12.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cm.expected_tokens(1.1, 2),
        lambda: cm.expected_tokens(float("nan"), 2),
        lambda: cm.expected_tokens(0.5, -1),
        lambda: cm.expected_tokens_from_positions([0.5, -0.1]),
        lambda: costs(plain=0),
        lambda: costs(plain=float("nan")),
        lambda: costs(head=-1),
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
