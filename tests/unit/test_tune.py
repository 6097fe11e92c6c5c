"""Tuning against an engine of arithmetic: drafts from a log, times from a cost model."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_early_exit_replay import COSTS, make

from selfspec_cli import interrupts
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import (
    GateConfig,
    HeadConfig,
    RunConfig,
    Runner,
    WorkloadConfig,
)
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.early_exit.draft_vocab import COUNTS_FILE
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import features
from selfspec_cli.early_exit.replay import Setting, draft_lengths, replay
from selfspec_cli.engine.live import Generation
from selfspec_cli.progress import Progress
from selfspec_cli.stages import exits, measure, search, tune
from selfspec_cli.stages.budget import Budget

OPENING = 30.0  # seconds until an engine is there


class FakeEngine:
    """Drafts as a log says they go, and takes the time that the costs say; deeper exits cost more and are righter."""

    vocab_size, max_model_len = 100, 2048

    def __init__(self, cfg, clock, pace=1.0):
        self.cfg, self.layer, self.clock, self.pace = cfg, cfg.layer, clock, pace
        self.costs = Costs(COSTS.plain, COSTS.draft * cfg.layer / 3, COSTS.verify, COSTS.verify_token)
        log = make(300, seed=cfg.layer)
        worse = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.5 / cfg.layer
        self.log = replace(log, accepted=torch.where(worse, 0, log.accepted))
        self.setting, self.generated, self.recorded = Setting("none", None, cfg.k), 0, False

    def set_draft_length(self, k):
        self.setting = Setting(self.setting.gate, self.setting.threshold, k)

    def set_gate(self, kind, threshold):
        self.setting = Setting(kind, threshold, self.setting.k)

    @contextmanager
    def recording(self):
        self.recorded = True
        yield lambda: self.log

    def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
        generation = self.answer(prompts, output_len)
        generation.seconds *= self.pace
        if generation.drafting and generation.drafting["rounds"]:
            generation.drafting["seconds"] *= self.pace
        self.clock.now += generation.seconds
        return generation

    @cache  # noqa: B019 - engines live as long as a test
    def replayed(self, setting):
        """What the log makes of a setting: its outcome, and the length of each draft."""
        return replay(self.log, setting, self.costs), draft_lengths(self.log, setting).tolist()

    def answer(self, prompts, output_len):
        self.generated += 1
        outputs = [[0] * output_len for _ in prompts]
        tokens = output_len * len(prompts)
        if not self.setting.k:
            return Generation(outputs, tokens * COSTS.plain, [], VerifyCounts(0, 0, 0, []), counters_of([]))
        outcome, lengths = self.replayed(self.setting)
        share = tokens / (outcome.rounds + outcome.accepted)
        seconds = tokens * self.costs.plain / outcome.speedup
        counts = VerifyCounts(outcome.rounds, outcome.drafted, outcome.accepted, [])
        own = counters_of(lengths)
        own["seconds"] = outcome.drafted * self.costs.draft * share
        for name in ("rounds", "steps", "drafted"):
            own[name] *= share
        return Generation(outputs, seconds, [], counts, own)


class Clock:
    """Stands still until something takes its time."""

    now = 1000.0

    def __call__(self):
        return self.now


def counters_of(lengths):
    counters = DraftCounters(10)
    for length in lengths:
        counters.round(1)
        for _ in range(length):
            counters.step(1)
    return counters.snapshot()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Opens fake engines and remembers them; the workload needs no text."""
    monkeypatch.setattr(tune, "LONGEST", 5)
    opened, clock = [], Clock()

    @contextmanager
    def open_engine(cfg):
        clock.now += found.opening
        opened.append(FakeEngine(cfg, clock, found.pace))
        yield opened[-1]
        clock.now += 2.0

    work = WorkloadConfig(prompts="random", num_prompts=2, output_len=16, input_len=4)
    cfgs = [RunConfig(layer=layer, workload=work, results_dir=str(tmp_path / "results")) for layer in (1, 3, 6, 12)]

    def run(minutes=500.0, trials=12, chosen=cfgs, **more):
        budget, conf = Budget(minutes, trials, clock), tmp_path / "conf"
        return tune.run(chosen, open_engine=open_engine, budget=budget, conf=conf, model_words=["model=m"], **more)

    found = SimpleNamespace(run=run, opened=opened, cfgs=cfgs, folder=tmp_path, clock=clock, pace=1.0, opening=OPENING)
    return found


def best_of_grid(cfg):
    engine = FakeEngine(cfg, Clock())
    settings = [Setting("none", None, k) for k in range(1, 6)]
    settings += [Setting("maxp", limit / 50, k) for k in range(2, 6) for limit in range(50)]
    settings += [Setting("margin", limit / 50, k) for k in range(2, 6) for limit in range(50)]
    return max(replay(engine.log, one, engine.costs).speedup for one in settings)


def test_the_choice_is_near_the_best_of_a_full_grid(lab):
    result = lab.run()
    best = max(best_of_grid(cfg) for cfg in lab.cfgs)
    assert result.choice.speedup >= 0.97 * best
    assert result.choice.speedup == max(finalist.speedup for finalist in result.finalists)


def test_the_choice_is_written_and_composes(lab, monkeypatch):
    result = lab.run()
    (file,) = (lab.folder / "conf" / "tuned").glob("reference-*.yaml")
    written = yaml.safe_load(file.read_text())
    assert written["overrides"] == result.overrides
    assert written["overrides"][0] == "model=m"
    assert f"layer={result.choice.cfg.layer}" in written["overrides"]


def test_it_goes_on_where_it_stopped(lab):
    lab.run(trials=6)
    engines, trials = len(lab.opened), sum(engine.generated for engine in lab.opened)
    result = lab.run(trials=6)
    # No exit is surveyed again and no trial measured again: only the finalists are.
    assert len(lab.opened) - engines < engines
    assert sum(engine.generated for engine in lab.opened[engines:]) < trials
    assert lab.run(trials=9).trials >= result.trials + 3


OPTIONS = [
    {"draft_weights": "fp8"},
    {"runner": Runner.v1},
    {"acceptance_length": 3.0},
]


@pytest.mark.parametrize("change", OPTIONS, ids=lambda change: next(iter(change)))
def test_other_drafts_are_logged_and_tried_anew(lab, change):
    """A survey and a search for each, in one folder; what one of them left serves it alone."""
    shared, other = lab.cfgs[1], replace(lab.cfgs[1], **change)
    first = lab.run(chosen=[shared])
    engines, generated = len(lab.opened), sum(engine.generated for engine in lab.opened)
    second = lab.run(chosen=[other])
    assert second.trials == first.trials
    assert len(lab.opened) == 2 * engines
    assert sum(engine.generated for engine in lab.opened[engines:]) == generated
    assert first.expected[0]["exit"] != second.expected[0]["exit"]
    lab.run(chosen=[shared, other])
    assert len(list((lab.folder / "results" / "tune").glob("*/drafts-*.pt"))) == 2


def test_what_drafts_is_told_apart_by_what_its_files_hold(tmp_path):
    first, again = tmp_path / "a" / "v.txt", tmp_path / "b" / "v.txt"
    for file, text in ((first, "1 2 3"), (again, "4 5 6")):
        file.parent.mkdir()
        file.write_text(text)
    listed = RunConfig(layer=3, vocab=str(first), head_dir=str(tmp_path))
    keys = [exits.draft_key(listed), exits.draft_key(replace(listed, vocab=str(again)))]
    first.write_text("1 2 3 4")
    keys.append(exits.draft_key(listed))
    counted = replace(listed, vocab="4096")
    keys.append(exits.draft_key(counted))
    counts = head_folder(counted) / COUNTS_FILE
    counts.parent.mkdir()
    counts.write_text("of another text")
    keys.append(exits.draft_key(counted))
    assert len(set(keys)) == 5
    assert exits.draft_key(replace(counted, gate=GateConfig("maxp"), threshold=0.2)) == keys[-1]


def finalist(layer, plain):
    return tune.Finalist(RunConfig(layer=layer), {"speedup": 2.0, "plain_tok_s": plain})


def test_a_machine_that_changed_its_pace_between_two_exits_is_a_warning():
    (warning,) = tune.pace_warnings([finalist(4, 210.0), finalist(3, 149.0), finalist(4, 210.0)])
    assert "149 tok/s beside E3-lens and 210 tok/s beside E4-lens" in warning
    assert "41%" in warning
    assert tune.pace_warnings([finalist(3, 100.0), finalist(4, 114.0)]) == []


def test_the_pace_of_plain_decoding_stands_beside_each_finalist(lab, monkeypatch):
    answer = FakeEngine.answer

    def slowed(self, prompts, output_len):
        """Twice as slow as before on the last engine, drafting and all."""
        generation = answer(self, prompts, output_len)
        generation.seconds *= 2 if len(lab.opened) == 4 else 1
        return generation

    monkeypatch.setattr(FakeEngine, "answer", slowed)
    monkeypatch.setattr(tune, "NEAR", 0.0)
    result = lab.run(chosen=lab.cfgs[1:3])
    document = tune.document(result)
    usual = 1 / COSTS.plain
    assert {round(one["plain_tok_s"], 3) for one in document["finalists"]} == {round(usual, 3), round(usual / 2, 3)}
    assert len(document["warnings"]) == 1
    assert "changed by 100%" in document["warnings"][0]


def test_a_dry_run_says_which_gates_lengths_and_minutes(lab):
    facts = tune.facts([replace(lab.cfgs[1], k=k) for k in (3, 5)], minutes=14, trials=18)
    assert facts["exits"] == ["E3-lens"]
    assert facts["gates"] == ["none", *features()]
    assert facts["k"] == "1 to 5"  # LONGEST, as it is here
    assert (facts["minutes"], facts["trials"]) == (14, "at most 18 on each of 1 engine(s)")


def test_two_exits_that_expect_less_end_the_survey(lab):
    layers = [1, 3, 12, 18, 20, 22]
    chosen = [RunConfig(layer=n, workload=lab.cfgs[0].workload, results_dir=lab.cfgs[0].results_dir) for n in layers]
    lab.run(chosen=chosen)
    assert 22 not in {engine.layer for engine in lab.opened}


@pytest.mark.slow
def test_other_weights_are_surveyed_however_the_first_ended(lab):
    """Two exits in a row that expect less end the survey of their own kind of weights."""
    work, results = lab.cfgs[0].workload, lab.cfgs[0].results_dir
    chosen = [
        RunConfig(layer=n, draft_weights=weights, workload=work, results_dir=results)
        for weights in ("shared", "int8")
        for n in (1, 3, 12, 18, 20, 22)
    ]
    lab.run(chosen=chosen, minutes=5000)
    seen = {(engine.cfg.draft_weights, engine.layer) for engine in lab.opened}
    assert ("shared", 22) not in seen and ("int8", 1) in seen and ("int8", 22) not in seen


def refusing(lab, monkeypatch, refused, meanwhile=lambda: None):
    """Engines of these layers do not start."""
    begin = FakeEngine.__init__

    def begun(self, cfg, *more):
        if cfg.layer in refused:
            meanwhile()
            raise SettingsError(f"draft_context = blocks:1024 is\nnot supported at {cfg.layer}")
        begin(self, cfg, *more)

    monkeypatch.setattr(FakeEngine, "__init__", begun)


class Failures(Progress):
    def __init__(self):
        self.said = []

    def failed(self, what, reason):
        self.said.append((what, reason))


def test_an_exit_that_cannot_be_had_is_left_out_with_the_reason(lab, monkeypatch):
    refusing(lab, monkeypatch, {3})
    result = lab.run(trials=6, progress=(heard := Failures()))
    reason = "draft_context = blocks:1024 is not supported at 3"
    assert heard.said == [("E3-lens", reason)]
    assert result.warnings == [f"E3-lens was left out: {reason}"]
    assert [row["exit"] for row in result.expected] == ["E1-lens", "E6-lens", "E12-lens"]
    assert tune.document(result)["warnings"] == result.warnings


def test_heads_are_tried_at_the_exits_that_look_promising(lab, monkeypatch):
    begin, tried = FakeEngine.__init__, []

    def begun(self, cfg, *more):
        if cfg.head.kind != "lens":
            tried.append(cfg.layer)
            if len(tried) == 1:
                raise RuntimeError
        begin(self, cfg, *more)

    monkeypatch.setattr(FakeEngine, "__init__", begun)
    monkeypatch.setattr(tune, "_is_fitted", lambda cfg: True)
    monkeypatch.setattr(tune, "NEAR", 0.0)
    result = lab.run(trials=6, heads=[HeadConfig(), HeadConfig("lsq")])
    best = sorted(result.expected[:4], key=lambda row: -row["speedup"])
    assert [row["exit"] for row in best[:2]] == [f"E{layer}-lens" for layer in tried]
    assert [row["exit"] for row in result.expected][4:] == [f"E{tried[1]}-lsq"]
    assert f"E{tried[0]}-lsq was left out: RuntimeError" in result.warnings


def test_the_first_exit_ends_the_search_where_it_cannot_be_had(lab, monkeypatch):
    refusing(lab, monkeypatch, {1})
    with pytest.raises(SettingsError, match="not supported at 1"):
        lab.run()
    assert lab.opened == []


def test_an_interrupt_is_no_reason_to_leave_an_exit_out(lab, monkeypatch):
    """An engine whose processes got it too fails in some way of its own."""
    refusing(lab, monkeypatch, {3}, meanwhile=lambda: monkeypatch.setattr(interrupts, "_waiting", True))
    heard = Failures()
    with pytest.raises(KeyboardInterrupt):
        lab.run(progress=heard)
    assert not heard.said


def test_copies_on_the_cpu_are_warned_of(lab):
    cfgs = [replace(lab.cfgs[0], draft_weights=weights) for weights in ("shared", "int8", "int4")]
    assert tune.costly_copies(cfgs[:1]) == []
    (line,) = tune.costly_copies(cfgs)
    assert line.startswith("draft_weights=int8,int4: the CPU dequantises copies")


def test_no_time_left_still_gives_an_answer(lab):
    result = lab.run(minutes=1e-9)
    assert result.trials == 0
    assert result.choice.speedup > 0


@pytest.mark.slow
@pytest.mark.parametrize("slower", [1.0, 1.3])
@pytest.mark.parametrize("minutes", [150, 200, 250, 350, 500, 900])
def test_it_ends_within_its_minutes(lab, monkeypatch, minutes, slower):
    """On the fake clock a survey takes 110 minutes, a batch of trials 18; the machine may slow down meanwhile."""
    answer = FakeEngine.answer

    def drifting(self, prompts, output_len):
        generation = answer(self, prompts, output_len)
        generation.seconds *= slower ** (len(lab.opened) > 4)
        return generation

    monkeypatch.setattr(FakeEngine, "answer", drifting)
    began = lab.clock.now
    result = lab.run(minutes=minutes, trials=1000)
    assert lab.clock.now - began <= minutes * 60
    assert result.seconds <= minutes * 60
    assert result.finalists


@pytest.mark.parametrize("minutes", [3, 8])
def test_a_slow_machine_keeps_the_minutes_and_says_what_it_left_out(lab, minutes):
    """A token takes plain decoding a tenth of a second here; all of the workload would take hours."""
    lab.pace = 0.1 / COSTS.plain
    work = replace(lab.cfgs[0].workload, num_prompts=8, output_len=512)
    chosen, began = [replace(cfg, workload=work) for cfg in lab.cfgs], lab.clock.now
    result = lab.run(minutes=minutes, trials=1000, chosen=chosen)
    assert lab.clock.now - began <= 60 * minutes
    assert result.choice.cfg.workload == work
    assert any("of the 512 tokens of a request" in warning for warning in result.warnings)
    surveys = sum(engine.recorded for engine in lab.opened)
    again = lab.run(minutes=5000, trials=6, chosen=chosen)
    assert sum(engine.recorded for engine in lab.opened) > surveys  # what was short of time is logged anew
    assert again.warnings == []


@pytest.mark.parametrize(("opening", "minutes", "tried"), [(60.0, 3, 1), (150.0, 8, 1), (50.0, 8, 3), (150.0, 14, 2)])
def test_starts_as_long_as_on_a_gpu_are_counted(lab, opening, minutes, tried):
    """A token takes plain decoding 2.6 ms. The engine of the exit that is searched on is not started again."""
    lab.opening, lab.pace = opening, 0.0026 / COSTS.plain
    work = replace(lab.cfgs[0].workload, num_prompts=16, output_len=256)
    chosen, began = [replace(cfg, workload=work) for cfg in lab.cfgs], lab.clock.now
    result = lab.run(minutes=minutes, trials=18, chosen=chosen)
    assert lab.clock.now - began <= 60 * minutes
    surveyed = [engine.layer for engine in lab.opened if engine.recorded]
    assert len(surveyed) == tried
    assert result.untried == [exits.name_of(cfg) for cfg in lab.cfgs[tried:]]
    assert f"there was no time for {', '.join(result.untried)}" in " ".join(result.warnings)
    assert len(lab.opened) == tried + (result.finalists[0].cfg.layer != surveyed[-1])
    again = lab.run(minutes=300, trials=18, chosen=chosen)
    assert not again.untried


def test_what_one_would_choose_by_hand_is_among_the_finalists(lab):
    """Unless it is expected to be far behind."""
    for least, found in ((0.0, True), (1.1, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tune, "BY_HAND", least)
            patch.setattr(search, "best", lambda *_: [])
            settings = [(one.measured["gate"], one.measured["k"]) for one in lab.run().finalists]
        assert (("none", 5) in settings) == found, settings


@pytest.mark.slow
def test_the_time_that_is_there_is_used(lab):
    began = lab.clock.now
    result = lab.run(minutes=500, trials=1000)
    assert result.trials > 12
    assert lab.clock.now - began > 0.7 * 500 * 60


def test_an_engine_that_would_not_be_open_in_time_is_left_out(lab, monkeypatch):
    monkeypatch.setattr(tune, "batch_seconds", lambda found: 1e6)
    result = lab.run(minutes=250)
    assert len({finalist.cfg.layer for finalist in result.finalists}) == 1


def test_what_there_was_time_for_names_only_what_was_cut(lab):
    def said(**given):
        work = replace(wanted, **given)
        return tune.short_of_time([tune.Finalist(replace(lab.cfgs[0], workload=work), {})], wanted, ())

    wanted = WorkloadConfig(num_prompts=8, output_len=256)
    assert said() == []
    (requests,), (tokens,), (both,) = said(num_prompts=3), said(output_len=64), said(num_prompts=1, output_len=16)
    assert requests.startswith("there was time for 3 of the workload's 8 requests, so")
    assert tokens.startswith("there was time for 64 of the 256 tokens of a request, so")
    assert "1 of the workload's 8 requests and for 16 of the 256 tokens of a request, so" in both


def test_what_ends_early_is_not_counted_as_complete(lab):
    class Heard(Progress):
        def __init__(self):
            self.counts, self.over = {}, {}

        def __call__(self, what, done, total):
            self.counts[what] = (done, total)

        def ended(self, what, done, total):
            assert self.counts.get(what, (done, total)) == (done, total)
            self.over[what] = (done, total)

    heard = Heard()
    layers = [1, 3, 12, 18, 20, 22]  # the last ones are not looked at, because those before expect less and less
    chosen = [replace(lab.cfgs[0], layer=layer) for layer in layers]
    lab.run(chosen=chosen, minutes=600, trials=1000, progress=heard)
    surveys = sum(engine.recorded for engine in lab.opened)
    assert heard.over["exits"] == (surveys, 6) and surveys < 6
    (trials,) = {over for what, over in heard.over.items() if what.startswith("trials")}
    assert 0 < trials[0] < trials[1] == 1000


def test_a_race_ends_before_the_repeat_that_has_no_time():
    clock, cfg = Clock(), RunConfig(layer=3, k=5, workload=WorkloadConfig(num_prompts=2, batch=1, output_len=8))
    asked = []

    def another(seconds):
        asked.append(seconds)
        return len(asked) < 2

    settings = [measure.PLAIN, Setting("none", None, 2)]
    measured = measure.run(FakeEngine(cfg, clock), cfg, [[1]] * 2, settings, repeats=5, warmup=1, another=another)
    assert [len(arm.repeats) for arm in measured] == [2, 2]
    assert asked[0] == pytest.approx(sum(part.seconds for arm in measured for part in arm.repeats[0]))


def test_a_stall_in_one_repeat_does_not_enter_the_costs():
    cfg, clock = RunConfig(layer=3, k=10, workload=WorkloadConfig(num_prompts=2, output_len=50)), Clock()
    settings = [measure.PLAIN, *(Setting("none", None, k) for k in (1, 5, 10))]
    plain, *drafting = measure.run(FakeEngine(cfg, clock), cfg, [[1]] * 2, settings, repeats=2)
    expected = measure.costs(plain, drafting)
    for arm in (plain, drafting[1]):
        arm.repeats[1][0].seconds *= 3
    assert measure.costs(plain, drafting) == expected


def test_a_threshold_survives_the_way_through_its_share(lab):
    log = make()
    for gate in ("maxp", "entropy", "survival"):
        setting = Setting(gate, float(torch.quantile(log.feature(gate).reshape(-1), 0.3)), 4)
        back = search._setting(gate, 4, search._parameters(setting, log)["passing"], log)
        assert back.threshold == pytest.approx(setting.threshold, rel=0.02, abs=0.01)


def test_gates_that_the_cost_model_rules_out_are_not_searched():
    outcomes = [replay(make(), setting, COSTS) for setting in (Setting("maxp", 0.5, 5), Setting("maxp", 0.999, 5))]
    assert search.worthwhile(outcomes) == ["maxp"]


def test_arms_take_turns_and_ratios_are_within_a_repeat():
    cfg = RunConfig(layer=3, k=5, workload=WorkloadConfig(num_prompts=4, batch=2, output_len=8))
    order = []

    class Noted(FakeEngine):
        def generate(self, prompts, output_len, **options):
            order.append((self.setting.k, len(prompts)))
            return super().generate(prompts, output_len, **options)

    settings = [measure.PLAIN, Setting("none", None, 2)]
    plain, two = measure.run(Noted(cfg, Clock()), cfg, [[1]] * 4, settings, repeats=3, warmup=0)
    assert len(order) == 3 * 2 * 2
    assert all(count == 2 for _, count in order)
    assert {order[0][0], order[1][0]} == {0, 2}
    assert order[0] != order[2]  # who goes first changes
    row = two.to_dict(plain)
    assert row["speedup"] == pytest.approx(two.median / plain.median)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert plain.to_dict(plain)["accept_rate"] is None


def test_one_arm_has_all_prompts_at_once_and_leaves_the_engine_as_it_is():
    cfg = RunConfig(layer=3, k=5, workload=WorkloadConfig(num_prompts=4, batch=2, output_len=8))
    engine, order = FakeEngine(cfg, Clock()), []
    generate = engine.generate
    engine.generate = lambda prompts, *words, **more: order.append(len(prompts)) or generate(prompts, *words, **more)
    engine.set_gate = engine.set_draft_length = None  # may not be called
    (arm,) = measure.run(engine, cfg, [[1]] * 4, repeats=3, warmup=1, timed=lambda: order.append("timed"))
    assert order == [4, "timed", 4, 4, 4]
    assert len(arm.repeats) == 3


def test_heads_that_are_not_fitted_are_not_tried(tmp_path):
    cfg = RunConfig(layer=3, head_dir=str(tmp_path), gate=GateConfig("none"))
    assert tune.with_heads(cfg, [HeadConfig(), HeadConfig("lsq")]) == []
