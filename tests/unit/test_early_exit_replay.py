"""Logged drafts replayed under other gates, the record that is replayed, and the costs that judge it."""

import itertools
from dataclasses import replace

import pytest
import torch
from all_statistics import all_statistics
from refusals import said

from selfspec_cli.early_exit.cost_model import Costs, fit_costs
from selfspec_cli.early_exit.draft_log import DraftLog, DraftRecorder
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.replay import Outcome, Setting, draft_lengths, oracle, replay, settings_for, thresholds

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


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (Setting("none", None, 4), "k=4 no gate"),
        (Setting("none", 0.5, 4), "k=4 no gate"),
        (Setting("maxp", None, 4), "k=4 no gate"),
        (Setting("maxp", 0.12345, 3), "k=3 maxp ≥ 0.123"),
        (Setting("varH", 4.0, 3), "k=3 varH ≤ 4"),
    ],
)
def test_a_setting_in_a_few_words(setting, text):
    assert setting.label() == text


def test_an_outcome_says_what_it_is_of():
    log = make(20)
    setting = Setting("margin", 0.5, 3)
    found = replay(log, setting, COSTS)
    assert found.setting == setting
    counts = {name: getattr(found, name) for name in ("drafted", "accepted", "speedup")}
    assert found.to_dict() == {"gate": "margin", "threshold": 0.5, "k": 3, "rounds": 20} | counts
    assert oracle(log, 2, COSTS).setting == Setting("none", None, 2)
    nothing = log.choose(torch.zeros(20, dtype=torch.bool))
    assert replay(nothing, Setting("none", None, 2), COSTS) == Outcome(Setting("none", None, 2), 0, 0, 0, 1.0)


def test_thresholds_are_quantiles_of_what_was_drafted():
    log = make(8)
    values = torch.linspace(0, 1, 9).repeat(8, 1)[:, :K]  # 0, 1/8, ... 1/2 in every round
    log.statistics[:, :, features().index("maxp")] = values
    assert thresholds(log, "maxp", 3) == [0.125, 0.25, 0.375]
    assert thresholds(log, "maxp", 1) == [0.25]
    assert len(thresholds(make(), "maxp")) == 16
    short = replace(log, drafted=torch.full_like(log.drafted, 1), accepted=torch.zeros_like(log.accepted))
    assert thresholds(short, "maxp", 3) == [0.0]


def test_settings_for_reads_the_statistics_that_a_log_has():
    log = make(8)
    fewer = replace(log, features=("adaedl", "entropy"), statistics=log.statistics[:, :, :2])
    assert {setting.gate for setting in settings_for(fewer, ["margin", "entropy"], [2])} == {"entropy"}
    wrong = said(SettingsError, fewer.feature, "margin")
    assert "logged statistic 'margin' is not known; allowed: adaedl, entropy" in wrong
    margins = settings_for(log, ["margin", "none"], [2, 1])
    assert margins == [
        *(Setting("margin", limit, 2) for limit in thresholds(log, "margin")),
        Setting("none", None, 2),
        Setting("none", None, 1),
    ]
    log.statistics[:, :, features().index("maxp")] = 1 / 3
    assert thresholds(log, "maxp") == [0.3333]


# ---- the record that is replayed ---------------------------------------------------------------------------------


def logits(*seeds):
    return torch.stack([torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 3 for seed in seeds])


def test_halves_of_a_log_are_of_every_other_request():
    even, odd = make(12).halves()  # requests are numbered 0 to 6, and again
    assert even.request.tolist() == [0, 2, 4, 6, 0, 2, 4]
    assert odd.request.tolist() == [1, 3, 5, 1, 3]


def test_statistics_are_those_of_each_step_and_survival_is_carried_on():
    recorder = DraftRecorder()
    recorder.BLOCK = 3  # several blocks, and one that is not full
    recorder.step(["a", "b"], logits(1, 2))
    recorder.step(["a"], logits(3))  # b's gate closed
    recorder.verdict(["a", "b"], [[7, 7], [7]], [2, 1])
    log = DraftLog.from_plain(recorder.plain(), k=4)
    first = all_statistics(logits(1))
    second = all_statistics(logits(3), before=first)
    assert torch.allclose(log.statistics[0, :2], torch.cat([first, second]), atol=1e-5)
    assert torch.allclose(log.statistics[1, 0], all_statistics(logits(2))[0], atol=1e-5)
    assert torch.isnan(log.statistics[0, 2:]).all()
    assert torch.isnan(log.statistics[1, 1:]).all()
    assert (log.drafted.tolist(), log.accepted.tolist(), log.request.tolist()) == ([2, 1], [1, 0], [0, 1])


def test_logits_that_are_sampled_from_in_place_do_not_change_the_record():
    recorder, given = DraftRecorder(), logits(1)
    recorder.step(["a"], given)
    given.zero_()
    recorder.verdict(["a"], [[1]], [1])
    assert recorder.plain()["statistics"][0][0] == all_statistics(logits(1))[0].tolist()


def test_only_what_was_verified_counts():
    recorder = DraftRecorder()
    for name in ("prefill", "cut", "dropped", "waits"):
        for seed in range(3):
            recorder.step([name], logits(seed))
    # In the middle of a prefill nothing is sampled; the scheduler cut one draft short and dropped another.
    recorder.verdict(["prefill", "cut", "dropped"], [[], [5, 6], [5]], [3, 1, 0])
    assert (recorder.plain()["drafted"], recorder.plain()["accepted"]) == ([1], [1])
    # A request that sat out a step is verified later; one whose draft has gone is not.
    recorder.verdict(["waits", "dropped"], [[1, 2, 3], [1, 2]], [3, 1])
    assert (recorder.plain()["drafted"], recorder.plain()["accepted"]) == ([1, 3], [1, 2])


def test_where_nothing_was_verified_a_log_is_empty():
    without_drafts = DraftRecorder()
    without_drafts.step(["a"], logits(1))
    without_drafts.verdict(["a"], [[1]], None)
    for recorder in (DraftRecorder(), without_drafts):
        log = DraftLog.from_plain(recorder.plain(), k=3)
        assert log.statistics.shape == (0, 3, len(features())) and log.features == features()
        assert log.drafted.shape == (0,)
        assert log.drafted.dtype == log.accepted.dtype == log.request.dtype == torch.int64


def test_a_record_goes_on_after_it_was_read():
    recorder = DraftRecorder()
    recorder.step(["a"], logits(1))
    recorder.plain()
    recorder.step(["a"], logits(2))
    recorder.verdict(["a"], [[1]], [2])
    first = all_statistics(logits(1))
    want = torch.cat([first, all_statistics(logits(2), before=first)])
    assert torch.allclose(torch.tensor(recorder.plain()["statistics"][0]), want, atol=1e-5)


# ---- what rounds cost ------------------------------------------------------------------------------------------------


def test_round_and_speedup_by_hand():
    as_plain = Costs(10.0, 2.5, verify=10.0)  # a verify pass takes as long as a plain step, whatever it verifies
    assert as_plain.round(3) == pytest.approx(17.5)
    assert as_plain.speedup(4, 3) == pytest.approx(40 / 17.5)
    assert as_plain.speedup(1, 0) == 1
    assert "k = -1 is out of range; allowed: 0 or more" in said(ValueError, as_plain.round, -1)
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
    found = fit_costs(arms, costs.plain)
    for name in ("plain", "draft", "verify", "verify_token", "start"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-9)


@pytest.mark.parametrize("drafting", [(1.0, 8.0), (4.0, 2.0)])
def test_drafting_neither_starts_at_a_gain_nor_gets_cheaper_with_length(drafting):
    found = fit_costs([(1, 10.0, drafting[0], 1), (4, 20.0, drafting[1], 1)], 7.0)
    assert found.start == 0
    assert found.draft == pytest.approx(sum(drafting) / 5)


def test_one_length_says_nothing_of_where_drafting_starts():
    found = fit_costs([(4, 20.0, 8.0, 1)], 7.0)
    assert (found.draft, found.start, found.verify_token, found.verify) == (2.0, 0.0, 0.0, 12.0)


def test_where_drafting_cannot_be_told_apart_a_round_still_costs_the_same():
    arms = [(k, 100 * COSTS.round(k), None, 100) for k in (1, 4, 8)]
    found = fit_costs(arms, COSTS.plain)
    assert [found.round(k) for k in (0, 3, 8)] == pytest.approx([COSTS.round(k) for k in (0, 3, 8)])
    assert found.draft == pytest.approx(COSTS.draft + COSTS.verify_token)


@pytest.mark.parametrize("wrong", [{"plain": 0}, {"plain": float("nan")}, {"start": -1.0}, {"verify_token": -1.0}])
def test_costs_that_are_not_positive_are_refused(wrong):
    assert "costs must be positive; given" in said(ValueError, replace, COSTS, **wrong)


@pytest.mark.parametrize("own", [None, 0.05])
def test_a_line_through_noise_leaves_something_for_the_verify_pass(own):
    """The longer round took so much longer that the line through both would cost nothing, or less, without drafts."""
    found = fit_costs([(1, 1.0, own, 1), (4, 16.0, own, 1)], 2.0)
    if own is None:
        assert (found.verify, found.draft) == pytest.approx((2.0, (8.5 - 2.0) / 2.5))
    else:
        assert (found.verify, found.verify_token) == pytest.approx((8.45, 0.0))
    faster = fit_costs([(1, 1.0, None, 1), (4, 16.0, None, 1)], 20.0)  # than a plain step: drafting is free then
    assert (faster.verify, faster.draft) == (8.5, 0.0)
    edge = fit_costs([(1, 1.0, None, 1), (4, 4.0, None, 1)], 2.0)  # a line through nothing
    assert (edge.verify, edge.draft) == pytest.approx((2.0, 0.2))
    fitted = fit_costs([(1, 1.5, 0.5, 1), (4, 4.5, 0.5, 1)], 2.0)
    assert (fitted.verify, fitted.verify_token) == (2.5, 0.0)
