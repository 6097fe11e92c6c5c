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
from selfspec_cli.config.model_files import head_folder
from selfspec_cli.config.schema import GateConfig, HeadConfig, RunConfig, Runner, WorkloadConfig
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.early_exit.draft_vocab import COUNTS_FILE
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import features
from selfspec_cli.early_exit.replay import Setting, draft_lengths, replay
from selfspec_cli.engine.live import Generation
from selfspec_cli.progress import Progress
from selfspec_cli.stages import exits, measure, tune

OPENING = 30.0  # seconds until an engine is there


class FakeEngine:
    """Drafts as a log says they go, and takes the time that the costs say; deeper exits cost more and are righter."""

    vocab_size, max_model_len = 100, 2048

    def __init__(self, cfg, clock):
        self.cfg, self.layer, self.clock = cfg, cfg.layer, clock
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
        clock.now += OPENING
        opened.append(FakeEngine(cfg, clock))
        yield opened[-1]
        clock.now += 2.0

    work = WorkloadConfig(prompts="random", num_prompts=2, output_len=16, input_len=4)
    cfgs = [RunConfig(layer=layer, workload=work, results_dir=str(tmp_path / "results")) for layer in (1, 3, 6, 12)]

    def run(minutes=5000.0, chosen=cfgs, **more):
        budget, conf = tune.Budget(minutes, clock), tmp_path / "conf"
        cfg, document = tune.run(
            chosen, open_engine=open_engine, budget=budget, conf=conf, model_words=["model=m"], **more
        )
        return SimpleNamespace(cfg=cfg, **document)

    found = SimpleNamespace(run=run, opened=opened, cfgs=cfgs, folder=tmp_path, clock=clock)
    return found


def best_of_grid(cfg):
    engine = FakeEngine(cfg, Clock())
    settings = [Setting("none", None, k) for k in range(1, 6)]
    settings += [Setting("maxp", limit / 50, k) for k in range(2, 6) for limit in range(50)]
    settings += [Setting("margin", limit / 50, k) for k in range(2, 6) for limit in range(50)]
    return max(replay(engine.log, one, engine.costs).speedup for one in settings)


def test_the_choice_is_near_the_best_of_a_full_grid_and_is_written_down(lab):
    result = lab.run()
    best = max(best_of_grid(cfg) for cfg in lab.cfgs)
    assert result.speedup >= 0.97 * best
    assert result.speedup == max(row["speedup"] for row in result.finalists)
    (file,) = (lab.folder / "conf" / "tuned").glob("reference-*.yaml")
    written = yaml.safe_load(file.read_text())
    assert written["overrides"] == result.overrides
    assert written["overrides"][0] == "model=m"
    assert f"layer={result.cfg.layer}" in written["overrides"]
    engines = len(lab.opened)
    lab.run()
    assert not any(engine.recorded for engine in lab.opened[engines:])  # no exit is surveyed again


@pytest.mark.parametrize(
    "change", [{"draft_weights": "fp8"}, {"runner": Runner.v1}, {"acceptance_length": 3.0}], ids=str
)
def test_other_drafts_are_logged_and_tried_anew(lab, change):
    """A survey for each, in one folder; what one of them left serves it alone."""
    shared, other = lab.cfgs[1], replace(lab.cfgs[1], **change)
    first = lab.run(chosen=[shared])
    engines, generated = len(lab.opened), sum(engine.generated for engine in lab.opened)
    second = lab.run(chosen=[other])
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


def test_a_dry_run_says_which_gates_lengths_and_minutes(lab):
    facts = tune.facts([replace(lab.cfgs[1], k=k) for k in (3, 5)], minutes=14)
    assert facts["exits"] == ["E3-lens"]
    assert facts["gates"] == ["none", *features()]
    assert facts["k"] == "1 to 5"  # LONGEST, as it is here
    assert facts["minutes"] == 14


def test_other_weights_are_surveyed_however_the_first_ended(lab):
    """Two exits in a row that expect less end the survey of their own kind of weights."""
    work, results = lab.cfgs[0].workload, lab.cfgs[0].results_dir
    chosen = [
        RunConfig(layer=n, draft_weights=weights, workload=work, results_dir=results)
        for weights in ("shared", "int8")
        for n in (1, 3, 12, 18, 20, 22)
    ]
    lab.run(chosen=chosen)
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
    result = lab.run(progress=(heard := Failures()))
    reason = "draft_context = blocks:1024 is not supported at 3"
    assert heard.said == [("E3-lens", reason)]
    assert result.warnings == [f"E3-lens was left out: {reason}"]
    assert [row["exit"] for row in result.expected] == ["E1-lens", "E6-lens", "E12-lens"]


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
    result = lab.run(heads=[HeadConfig(), HeadConfig("lsq")])
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


def test_no_exit_is_begun_after_half_of_the_time_and_no_engine_after_all_of_it(lab, monkeypatch):
    """The opening of an engine takes all of the time here, so one exit is surveyed, and a repeat measured there."""
    monkeypatch.setattr(tune, "NEAR", 0.0)
    result = lab.run(minutes=OPENING / 60)
    assert [engine.layer for engine in lab.opened] == [1]
    assert result.untried == ["E3-lens", "E6-lens", "E12-lens"] and {row["E"] for row in result.finalists} == {1}
    assert "there was no time for E3-lens, E6-lens, E12-lens; with more --minutes" in result.warnings[0]
    again = lab.run()
    assert not again.untried and len({row["E"] for row in again.finalists}) == tune.ENGINES
    surveyed = [engine.layer for engine in lab.opened if engine.recorded]
    assert surveyed == [1, 3, 6, 12]  # each once: what there was time for is in the folder
    assert lab.run(minutes=OPENING / 60).untried == []


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


def test_the_best_of_each_worthwhile_gate_races_and_what_one_would_choose_by_hand():
    """By hand: the longest drafts without a gate, unless they are expected to be far behind."""
    log = make()
    by_hand = Setting("none", None, log.k)
    outcomes = [replay(log, Setting("maxp", 0.1 * n, 5), COSTS) for n in range(9)]
    fast = [replace(one, speedup=2.0 - 0.001 * n) for n, one in enumerate(outcomes)]
    others = [
        replace(fast[0], setting=Setting(gate, 0.2, 5), speedup=x) for gate, x in (("margin", 1.95), ("varH", 1.9))
    ]
    for expected, races in ((1.85, True), (1.7, False)):
        last = replace(fast[0], setting=by_hand, speedup=expected)
        found = tune.finalists_of(exits.Exit(RunConfig(layer=3), log, COSTS, (*fast, *others, last)))
        assert found[:3] == [fast[0].setting, others[0].setting, fast[1].setting]
        assert len(found) == tune.FINALISTS + races
        assert (by_hand in found) == races


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
