"""Acceptance algebra for any logs and rounds: counters, logs and replay; and the unit of costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import logs

from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.replay import Setting, draft_lengths, settings_for, thresholds


def test_the_unit_of_time_changes_no_speedup():
    minutes, seconds = Costs(0.1, 0.02, 0.12, 0.01, 0.005), Costs(6.0, 1.2, 7.2, 0.6, 0.3)
    assert minutes.speedup(3.0, 4) == pytest.approx(seconds.speedup(3.0, 4))


# ---- counters --------------------------------------------------------------------------------------------------------

K = 4
ROUND = st.lists(st.integers(1, 6), min_size=1, max_size=K).map(lambda active: sorted(active, reverse=True))
ROUNDS = st.lists(ROUND, max_size=8)


def rounds_of(*rounds, k=3, made=None):
    """Counters after rounds given as lists of active requests, one number a step; a round below k ended early."""
    made = made or DraftCounters(k)
    for steps in rounds:
        made.round(steps[0])
        for active in steps:
            made.step(active)
        if len(steps) < k:
            made.ended_early()
    return made


def test_a_summary_of_counts_from_before_there_were_more_of_them():
    counted = rounds_of([4, 2]).snapshot()
    for name in ("active_histogram", "nan_logits", "seconds"):
        del counted[name]
    summed = counters.summary(counted, rounds=2, drafted=6, accepted=3)
    assert summed["nan_logits"] == 0
    assert summed["active_requests_min"] is summed["active_requests_max"] is summed["draft_seconds"] is None


def test_copied_tokens_are_made_too():
    assert counters.made({"drafted": 6, "free_drafted": 3}) == 9
    assert counters.made({"drafted": 6}) == 6


@given(ROUNDS)
def test_histograms_and_totals_tell_one_story(rounds):
    counted = rounds_of(*rounds, k=K).snapshot()
    lengths, active = counted["length_histogram"], counted["active_histogram"]
    places = [sum(steps[place] for steps in rounds if place < len(steps)) for place in range(K)]
    assert counted["position_histogram"] == places
    assert sum(lengths) == counted["rounds"] == len(rounds)
    assert sum(active) == counted["steps"] == sum(i * n for i, n in enumerate(lengths)) == sum(map(len, rounds))
    assert sum(i * n for i, n in enumerate(active)) == counted["drafted"] == sum(map(sum, rounds))
    assert counted["gate_ended"] == sum(lengths[:K])


@given(ROUNDS, ROUNDS)
def test_two_stretches_and_the_whole(first, second):
    made = rounds_of(*first, k=K)
    before = made.snapshot()
    after = rounds_of(*second, k=K, made=made).snapshot()
    stretch = counters.since(after, before)
    alone = rounds_of(*second, k=K).snapshot()

    def same(one, other):
        return one.keys() == other.keys() and all(_stripped(one[name]) == _stripped(other[name]) for name in one)

    assert same(stretch, alone)
    assert same(counters.total([before, None, stretch]), after)
    assert same(counters.total([stretch, before]), after)
    assert before == rounds_of(*first, k=K).snapshot()  # a snapshot does not change behind its owner's back


def _stripped(value):
    """A histogram without the zeros at its end."""
    while isinstance(value, list) and value and not value[-1]:
        value = value[:-1]
    return value


@given(ROUNDS)
def test_the_summary_is_shares_of_the_counts(rounds):
    counted = rounds_of(*rounds, k=K).snapshot() | {"nan_logits": 3, "seconds": 1.5}
    summed = counters.summary(counted, 5, 20, 8)
    steps = [active for taken in rounds for active in taken]
    assert summed == {
        "rounds": len(rounds),
        "draft_steps": len(steps),
        "draft_steps_histogram": counted["length_histogram"],
        "mean_draft_steps": len(steps) / len(rounds) if rounds else None,
        "ended_by_gate": sum(len(taken) < K for taken in rounds) / len(rounds) if rounds else None,
        "active_requests_mean": sum(steps) / len(steps) if steps else None,
        "active_requests_min": min(steps, default=None),
        "active_requests_max": max(steps, default=None),
        "acceptance_per_active_request": 8 / 20,
        "accepted_per_request_and_round": 8 / 5,
        "nan_logits": 3,
        "draft_seconds": 1.5,
    }


@given(st.integers(0, K), st.lists(st.tuples(st.integers(0, K + 1), st.sampled_from([None, *counters.REASONS]))))
def test_what_keeps_requests_from_being_drafted_for_is_counted_beside_the_rest(limit, requests):
    made = DraftCounters(K)
    assert made.landed() == made.snapshot() | {"off": dict.fromkeys(counters.REASONS, 0), "in_force": 0}
    first = made.landed()
    for _ in range(2):
        made.allowed(limit, requests)
    taken = made.landed()
    assert taken["in_force"] == min(limit, max((k for k, _ in requests), default=limit))
    assert taken["off"] == {name: 2 * sum(why == name for _, why in requests) for name in counters.REASONS}
    assert sum(first["off"].values()) == 0  # what landed does not change behind its reader's back


VERDICTS = st.lists(st.integers(0, 3), max_size=10)  # tokens accepted of three, round by round


def verified(accepted):
    at = [sum(number > place for number in accepted) for place in range(3)]
    return VerifyCounts(len(accepted), 3 * len(accepted), sum(accepted), at)


@given(VERDICTS, VERDICTS, VERDICTS)
def test_verify_counts_add_and_subtract(one, two, three):
    parts = [verified(one), None, verified(two), verified(three)]
    assert VerifyCounts.total(parts) == verified(one + two + three)
    assert verified(one + two).since(verified(one)) == verified(two)
    assert sum(verified(one).accepted_at) == verified(one).accepted
    assert VerifyCounts.total([None]) is VerifyCounts.total([]) is None


# ---- logs and replay -------------------------------------------------------------------------------------------------


@given(logs())
def test_places_of_a_log_nest(log):
    drafted, accepted, at_stake = log.was_drafted, log.was_accepted, log.was_at_stake
    assert drafted.sum(1).tolist() == log.drafted.tolist()
    assert accepted.sum(1).tolist() == log.accepted.tolist()
    assert not (accepted & ~at_stake).any() and not (at_stake & ~drafted).any()
    # A verdict is on every accepted token, and on the one after them if there is one.
    assert at_stake.sum(1).tolist() == torch.minimum(log.accepted + 1, log.drafted).tolist()
    first, second = log.halves()
    assert len(first.drafted) + len(second.drafted) == len(log.drafted)
    assert not set(first.request.tolist()) & set(second.request.tolist())


@given(logs(), st.integers(1, 5), st.sampled_from(["none", *features()]), st.data())
def test_a_stricter_gate_and_a_shorter_draft_draft_less(log, k, gate, data):
    low, high = GATES[gate].statistic_range(100)
    limits = sorted(data.draw(st.tuples(st.floats(low, high), st.floats(low, high))))
    loose, strict = limits if GATES[gate].direction == "at_least" else limits[::-1]
    loose, strict = (Setting(gate, None if gate == "none" else limit, k) for limit in (loose, strict))
    longer, shorter = draft_lengths(log, loose), draft_lengths(log, strict)
    assert (shorter <= longer).all()
    assert (shorter >= 1).all() and (longer <= log.drafted.clamp_max(k)).all()
    assert (draft_lengths(log, Setting(gate, loose.threshold, k + 1)) >= longer).all()


def test_a_log_without_a_number_has_no_thresholds():
    """Every logit was NaN: there is nothing to try, and only the draft length is left."""
    log = DraftLog(
        torch.full((2, 3, len(features())), torch.nan),
        torch.tensor([3, 3]),
        torch.tensor([0, 0]),
        torch.tensor([0, 0]),
        features(),
    )
    assert thresholds(log, "maxp") == []
    assert settings_for(log, ["none", "maxp"], [3]) == [Setting("none", None, 3)]
