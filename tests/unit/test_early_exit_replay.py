import itertools
from dataclasses import replace

import pytest
import torch
from all_statistics import all_statistics

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.replay import Setting, draft_lengths, oracle, replay, settings_for, thresholds

K = 5
COSTS = Costs(plain=7.0, draft=1.0, verify=7.2, verify_token=0.25)


def make(rounds=200, seed=0):
    """A log whose confidence falls where drafts are wrong."""
    draw = torch.Generator().manual_seed(seed)
    accepted = torch.randint(0, K + 1, (rounds,), generator=draw)
    right = torch.arange(K) < accepted.unsqueeze(1)
    logits = torch.randn(rounds * K, 50, generator=draw)
    logits[:, 0] += torch.where(right.reshape(-1), 6.0, 2.5)
    statistics = all_statistics(logits).view(rounds, K, -1)
    statistics[:, :, features().index("survival")] = statistics[:, :, features().index("maxp")].cumprod(1)
    return DraftLog(statistics, torch.full((rounds,), K), accepted, torch.arange(rounds) % 7, features())


def slow_length(log, row, setting):
    """A draft loop over one logged round, as the proposer runs it."""
    rule = GATES[setting.gate]
    for step in range(setting.k):
        value = float(log.feature(setting.gate)[row, step]) if rule.key else 0.0
        open_ = rule.key is None or (
            value >= setting.threshold if rule.direction == "at_least" else value <= setting.threshold
        )
        if not open_ or step + 1 == setting.k:
            return step + 1
    raise AssertionError


@pytest.mark.parametrize("gate", ["none", *features()])
def test_lengths_are_those_of_the_loop(gate):
    log = make()
    for limit, k in itertools.product(thresholds(log, gate, 4) if gate != "none" else [None], (1, 3, K)):
        setting = Setting(gate, limit, k)
        want = [slow_length(log, row, setting) for row in range(len(log.drafted))]
        assert draft_lengths(log, setting).tolist() == want


def test_a_short_draft_replays_no_longer_than_it_was():
    log = make()
    short = replace(log, drafted=torch.full_like(log.drafted, 2), accepted=log.accepted.clamp_max(2))
    assert draft_lengths(short, Setting("none", None, K)).tolist() == [2] * len(log.drafted)


def test_nan_closes_the_gate():
    log = make(3)
    log.statistics[1, 0] = torch.nan
    assert draft_lengths(log, Setting("maxp", 0.0, K)).tolist() == [K, 1, K]


def test_calibrated_follows_its_map():
    log = make()
    steep = Calibration("margin", (0.0, 0.4, 0.5, 1.0), (0.0, 0.0, 1.0, 1.0))
    got = draft_lengths(log, Setting("calibrated", 1.0, K), steep)
    assert got.tolist() == draft_lengths(log, Setting("margin", 0.5, K)).tolist()


def test_the_outcome_counts_and_prices():
    log = make()
    setting = Setting("none", None, 3)
    outcome = replay(log, setting, COSTS)
    accepted = int(log.accepted.clamp_max(3).sum())
    assert (outcome.rounds, outcome.drafted, outcome.accepted) == (200, 600, accepted)
    assert outcome.speedup == pytest.approx((200 + accepted) * 7.0 / (200 * 7.2 + 600 * 1.25))
    assert outcome.speedup == pytest.approx((200 + accepted) / 200 * COSTS.plain / COSTS.round(3))


def test_no_gate_beats_the_oracle():
    log = make()
    bound = oracle(log, K, COSTS)
    assert bound.accepted == int(log.accepted.sum())
    for setting in settings_for(log, ["none", *features()], range(1, K + 1)):
        assert replay(log, setting, COSTS).speedup <= bound.speedup + 1e-9


def test_thresholds_lie_in_the_gates_range_and_rise():
    log = make()
    for gate in features():
        found = thresholds(log, gate)
        assert found == sorted(set(found))
        assert all(GATES[gate].low <= value <= GATES[gate].high for value in found)


def test_settings_for_spans_gates_and_lengths():
    log = make()
    found = settings_for(log, ["none", "maxp", "calibrated"], (1, 2))
    assert [setting for setting in found if setting.gate == "none"] == [
        Setting("none", None, 1),
        Setting("none", None, 2),
    ]
    # One step leaves a gate nothing to decide, and without a map there is no calibrated gate.
    assert {(setting.gate, setting.k) for setting in found} == {("none", 1), ("none", 2), ("maxp", 2)}


def test_a_start_is_paid_once_a_round():
    log, setting = make(), Setting("none", None, 3)
    free, paid = (replay(log, setting, Costs(7.0, 1.0, 7.2, 0.25, start)) for start in (0.0, 0.5))
    assert free.speedup / paid.speedup == pytest.approx((7.2 + 0.5 + 3 * 1.25) / (7.2 + 3 * 1.25))
