"""Thompson sampling over thresholds and lengths: what it converges to, what it costs, and what it forgets."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec_cli.early_exit.bandit import MEMORY, Arm, Bandit, Known, arms
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.thresholds import stricter_than
from selfspec_cli.vllm_plugin.v1.lengths import DraftLengths


def play(bandit, rounds, acceptance, seed=0):
    """Arms chosen and their rewards, where every drafted token stands with the same probability."""
    draw, chosen = random.Random(seed), []
    for _ in range(rounds):
        arm = bandit.choose()
        accepted = 0
        while accepted < arm.k and draw.random() < acceptance:
            accepted += 1
        bandit.learn(arm, [(accepted, arm.k)])
        chosen.append(arm)
    return chosen


def rate(k, acceptance, cost):
    return sum(acceptance**place for place in range(k + 1)) / (1 + cost * k)


@pytest.mark.parametrize(("acceptance", "cost"), [(0.0, 0.2), (0.3, 0.2), (0.6, 0.2), (0.9, 0.1), (0.95, 0.02)])
def test_it_plays_nearly_as_well_as_the_best_arm(acceptance, cost):
    choices = arms("none", None, 8)
    best = max(rate(arm.k, acceptance, cost) for arm in choices)
    chosen = play(Bandit(choices, cost), 3000, acceptance)
    tokens = sum(rate(arm.k, acceptance, cost) * (1 + cost * arm.k) for arm in chosen)
    time = sum(1 + cost * arm.k for arm in chosen)
    assert tokens / time > 0.94 * best


def test_it_follows_traffic_that_changes():
    bandit = Bandit(arms("none", None, 8), 0.15)
    play(bandit, 2000, 0.95)
    play(bandit, 6000, 0.0, seed=1)
    late = play(bandit, 500, 0.0, seed=2)
    assert sum(arm.k for arm in late) / 500 < 0.5
    play(bandit, 6000, 0.95, seed=3)
    assert sum(arm.k for arm in play(bandit, 500, 0.95, seed=4)) / 500 > 5


def test_the_same_rounds_choose_the_same_arms():
    runs = [play(Bandit(arms("maxp", 0.3, 4), 0.2), 200, 0.6) for _ in range(2)]
    assert runs[0] == runs[1]


def test_arms_are_no_drafts_each_length_and_longer_ones_behind_a_stricter_gate():
    assert arms("none", None, 4) == (Arm(None, 0), Arm(None, 1), Arm(None, 2), Arm(None, 4))
    assert arms("maxp", 0.4, 4)[4:] == (Arm(0.7, 2), Arm(0.7, 4))
    assert arms("varH", 4.0, 2)[-1] == Arm(2.0, 2)


@given(st.sampled_from(sorted(GATES)), st.integers(1, 12), st.data())
def test_every_threshold_of_an_arm_is_one_that_the_gate_takes_and_stricter(name, k, data):
    gate = GATES[name]
    low, high = max(gate.low, -100.0), min(gate.high, 100.0)
    threshold = None if gate.key is None else data.draw(st.floats(low, high))
    found = arms(name, threshold, k)
    assert found[0].k == 0 and {arm.k for arm in found} >= {0, 1, k} and len(set(found)) == len(found)
    for arm in found:
        assert 0 <= arm.k <= k
        if arm.threshold is not None:
            assert gate.low <= arm.threshold <= gate.high
            limit = gate.default if threshold is None else threshold
            room = 1e-4  # written with four places
            assert arm.threshold >= limit - room if gate.direction == "at_least" else arm.threshold <= abs(limit) + room
    assert stricter_than("none", None) is None


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)), max_size=60))
def test_longer_drafts_yield_more_and_take_longer_by_what_is_known(rounds):
    known = Known(8)
    for accepted, steps, k in rounds:
        steps = min(steps, k)
        known.fade(1 - 1 / MEMORY)
        known.add(min(accepted, steps), steps, k)
    for found, start in ((known.drawn_tokens(random.Random(0)), 1.0), (known.steps(), 0.0)):
        assert len(found) == 9 and found[0] == start
        gains = [after - before for before, after in pairwise(found)]
        assert all(0 <= gain <= 1 for gain in gains)
        assert all(later <= sooner + 1e-12 for sooner, later in pairwise(gains))


def test_what_is_known_is_counted_by_place():
    known = Known(3)
    known.add(1, 2, 3)  # two drafts, the first stood, and the gate ended the draft before the third
    known.add(2, 2, 2)  # as many as there might be
    assert (known.stood, known.failed) == ([2, 1, 0], [0, 1, 0])
    assert (known.went, known.ended) == ([2, 2, 0], [0, 0, 1])
    assert known.steps()[:2] == [0.0, 1.0]


def settings(**more):
    spec = {"num_speculative_tokens": 4, "layer_skip": 2, "bandit": True, "draft_cost": 0.2} | more
    return ResolvedSettings.from_user(spec, 8)


class Request:
    def __init__(self, extra_args=None):
        self.sampling_params = type("Parameters", (), {"extra_args": extra_args})()


def test_on_the_v1_runner_all_requests_of_a_round_have_one_arm_within_table_and_wishes():
    lengths = DraftLengths(settings(length_table="3:2", gate="maxp", threshold=0.4))
    requests = {"a": Request(), "b": Request({"selfspec_k": 1}), "c": Request({"selfspec_threshold": 0.1})}
    seen = set()
    for _ in range(300):
        found = lengths.budgets(requests, 2, list(requests), [10] * 3)
        arm = lengths._arm
        assert [one.k for one in found] == [arm.k, min(1, arm.k), arm.k]
        assert [one.threshold for one in found] == [arm.threshold, arm.threshold, 0.1]
        assert all((one.off == "acceptance") == (one.k == 0) for one in found)
        seen.add(arm)
        lengths.verdict(list(requests), [[1, 2], [1], [1, 2, 3]], [one.k for one in found])
        assert lengths._arm is None
    assert len(seen) > 3
    assert {one.k for one in lengths.budgets(requests, 3, list(requests), [10] * 3)} <= {0, 1, 2}


def test_a_round_is_told_of_every_request_that_was_drafted_for():
    lengths = DraftLengths(settings())
    learned = []
    lengths._bandit.learn = lambda arm, rounds: learned.append((arm, list(rounds)))
    lengths._arm = Arm(None, 2)
    lengths.verdict(["a", "b", "c", "d"], [[1, 2, 3], [1], [], [1]], [2, 1, 0, 0])
    assert learned.pop() == (Arm(None, 2), [(2, 2), (0, 1)])
    lengths.verdict(["a"], [[1]], [1])  # of no round of an arm
    lengths._arm = Arm(None, 2)
    lengths.verdict(["a"], [[1]], None)  # nobody was drafted for
    assert not learned
    lengths._arm = Arm(None, 0)
    lengths.verdict(["a"], [[1]], None)  # but time passes
    assert learned.pop() == (Arm(None, 0), [])


def test_it_does_not_go_with_lengths_by_acceptance():
    with pytest.raises(SettingsError, match="adaptive_length and bandit both choose"):
        settings(adaptive_length=True)
    assert settings(draft_cost=None).draft_cost == pytest.approx(3 / 8)
    assert ResolvedSettings.from_dict(settings().to_dict()) == settings()
