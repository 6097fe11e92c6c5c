"""The table of draft lengths by load, measured on an engine of arithmetic."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from selfspec_cli.commands.configs import numbers
from selfspec_cli.config.schema import ConfigError, GateConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.cost_model import expected_tokens
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.live import Generation
from selfspec_cli.record.latency import RequestTimes
from selfspec_cli.stages import loads, measure

K, DRAFT, RATE = 4, 0.2, 0.8


class Engine:
    """Verifying costs nothing more up to 32 tokens and in proportion beyond. Behind a gate that closes, a request
    drafts less and loses some, but a batch drafts on as long as any request does."""

    vocab_size, max_model_len = 100, 512

    def __init__(self, cfg):
        self.cfg, self.setting = cfg, measure.PLAIN

    def set_draft_length(self, k):
        self.setting = Setting(self.setting.gate, self.setting.threshold, k)

    def set_gate(self, kind, threshold, calibration=None):
        self.setting = Setting(kind, threshold, self.setting.k)

    def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
        k, closes = self.setting.k, bool(self.setting.threshold)
        step = lambda tokens: max(1.0, tokens / 32)  # noqa: E731
        steps = k / 2 if closes and batch == 1 else k
        yielded = expected_tokens(RATE, k) * (0.9 if closes else 1.0)
        rounds = output_len / yielded if k else output_len
        seconds = rounds * (step(batch * (1 + k)) + DRAFT * steps) if k else rounds * step(batch)
        counts = VerifyCounts(round(rounds * batch), 0, 0, []) if k else VerifyCounts(0, 0, 0, [])
        return Generation([[0] * output_len for _ in prompts], seconds, [], counts, DraftCounters(K).snapshot())


@pytest.fixture
def opened():
    return []


@pytest.fixture
def open_engine(opened):
    @contextmanager
    def opener(cfg):
        opened.append(cfg)
        yield Engine(cfg)

    return opener


def config(**more):
    work = WorkloadConfig(prompts="random", num_prompts=2, output_len=400, input_len=4)
    return RunConfig(layer=3, k=K, workload=work, **more)


def test_every_length_that_is_tried_has_a_width_of_its_own_and_none_is_in_force():
    table = LengthTable.parse(loads.every_width(6), 6)
    assert table.lengths == (6, 4, 2, 1)
    assert table.at(10_000, 10**6).k == 6


def test_drafts_are_long_where_they_are_cheap_and_left_out_where_they_are_not(open_engine, opened):
    cfg, found = loads.run(config(), [1, 4, 16, 128], open_engine)
    assert [load.requests for load in found] == [1, 4, 16, 128]
    table = LengthTable.parse(cfg.length_table, K)
    assert [table.at(n).k for n in (1, 4)] == [K, K]
    assert table.at(16).k < K
    assert table.at(128).k == table.at(1000).k == 0
    assert opened[0].engine.max_num_seqs >= 128
    assert LengthTable.parse(opened[0].length_table, K).lengths == (4, 2, 1)


def test_the_cost_of_a_round_is_what_it_takes_beyond_a_plain_step(open_engine):
    _, found = loads.run(config(), [1], open_engine)
    assert found[0].best == Setting("none", None, K)
    assert found[0].cost == pytest.approx(K * DRAFT, abs=0.01)


def test_between_two_loads_the_nearer_by_ratio_decides():
    found = [loads.Load(n, Setting("none", None, k), None, []) for n, k in ((1, 4), (16, 2), (64, 0))]
    assert str(loads.table(found, Setting("none", None, K))) == "1:4 4:2 32:0"


def test_a_gate_that_stays_open_is_tried_and_written_only_where_it_is_better(open_engine):
    cfg = config(gate=GateConfig("maxp"), threshold=0.4)
    tried = loads.settings(Setting("maxp", 0.4, K))
    assert {(one.k, one.threshold) for one in tried} == {(1, 0.4), (2, 0.4), (2, 0.0), (4, 0.4), (4, 0.0)}
    assert {one.threshold for one in loads.settings(Setting("maxp", 0.0, K))} == {0.0}
    assert {one.threshold for one in loads.settings(Setting("none", None, K))} == {None}
    cfg, found = loads.run(cfg, [1, 4], open_engine)
    assert [load.best.threshold for load in found] == [0.4, 0.0]
    assert cfg.length_table.split()[0].startswith("1:4*")
    assert "/0*" in cfg.length_table.split()[1]
    assert LengthTable.parse(cfg.length_table, K).at(4).threshold == 0.0


def test_what_there_was_no_time_for_is_named(open_engine):
    cfg, found = loads.run(config(), [1, 4, 8], open_engine, go_on=lambda: False)
    assert [load.requests for load in found] == [1]
    assert loads.doubts([1, 4, 8], found) == [
        "no time was left for 4, 8 running requests: the table of lengths goes on there as before; give more --minutes"
    ]
    assert loads.doubts([1], found) == []
    assert LengthTable.parse(cfg.length_table, K).at(8).k == K


def test_numbers_of_an_option():
    assert numbers("--loads", " 8,1, 8") == [1, 8]
    assert numbers("--loads", "") == []
    for wrong in ("0", "1,x", "1;8", "-3"):
        with pytest.raises(ConfigError, match="no whole number of 1 or more"):
            numbers("--loads", wrong)


@pytest.mark.parametrize(
    ("tried", "wanted"),
    [
        ({1: (120, 9.0), 2: (140, 9.9), 4: (138, 9.0)}, 2),  # the fastest
        ({1: (120, 9.0), 2: (140, 10.1), 4: (138, 9.0)}, 4),  # as fast, and its slowest requests are not slower
        ({1: (120, 9.0), 2: (140, 10.1), 4: (137, 9.0)}, 2),  # more than two per cent slower
        ({1: (139, 10.2), 2: (140, 10.1)}, 2),  # all of them make the slowest requests slower
        ({1: (100.5, 9.0), 2: (101.5, 10.1)}, 2),  # what does not pay is no way out
        ({1: (120, None), 2: (119, 9.0)}, 1),  # not measured
        ({1: (100.9, 9.0), 2: (80, 9.0)}, None),  # a gain below one per cent
        ({}, None),
    ],
)
def test_the_fastest_is_chosen_that_does_not_make_the_slowest_requests_slower(tried, wanted):
    speeds = {k: loads.Speed(*speed) for k, speed in tried.items()}
    assert loads.fastest(speeds, loads.Speed(100.0, 10.0)) == wanted


def test_without_times_of_plain_decoding_the_fastest_is_chosen():
    assert loads.fastest({1: loads.Speed(120, 9.0), 2: loads.Speed(140, 99.0)}, loads.Speed(100.0)) == 2


class Uneven(Engine):
    """Drafts of four are as fast as drafts of two, and one request takes three times as long as plain decoding's."""

    def generate(self, prompts, output_len, **more):
        k = self.setting.k
        self.setting = Setting(self.setting.gate, self.setting.threshold, min(k, 2))
        found = super().generate(prompts, output_len, **more)
        self.setting = Setting(self.setting.gate, self.setting.threshold, k)
        slow = 3.0 * output_len if k == 4 else found.seconds
        ends = (slow, *[found.seconds] * (len(prompts) - 1))
        found.requests = [RequestTimes(0.0, (0.0, end), output_len) for end in ends]
        found.seconds *= 0.99 if k == 4 else 1.0
        return found


def test_a_length_that_makes_one_request_slow_is_not_chosen_where_another_is_as_fast():
    @contextmanager
    def opener(cfg):
        yield Uneven(cfg)

    cfg, found = loads.run(config(), [1, 4], opener)
    assert [load.best.k for load in found] == [2, 2]
    assert LengthTable.parse(cfg.length_table, K).at(4).k == 2
    slowest = {row["k"]: row["tpot_p99_ms"] for row in found[1].rows}
    assert slowest[2] < slowest[0] < slowest[4]
