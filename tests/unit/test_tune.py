"""Tuning against an engine of arithmetic (drafts from a log, times from a cost model); what roc and tune share: which
exits are meant, what is logged there, how they are compared; and ROC curves."""

import csv
import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from commands import Clock
from test_early_exit_replay import COSTS, make

from selfspec_cli import interrupts
from selfspec_cli.commands import configs
from selfspec_cli.config import schema
from selfspec_cli.config.model_files import head_folder
from selfspec_cli.config.schema import (
    ConfigError,
    GateConfig,
    HeadConfig,
    ModelConfig,
    RunConfig,
    Runner,
    WorkloadConfig,
)
from selfspec_cli.early_exit import replay as curves
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.early_exit.draft_vocab import COUNTS_FILE
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.replay import Setting, replay
from selfspec_cli.engine.live import Generation
from selfspec_cli.progress import Progress
from selfspec_cli.report import make as report
from selfspec_cli.stages import exits, measure, roc, tune
from selfspec_cli.stages.exits import Exit

OPENING = 30.0  # seconds until an engine is there


class FakeEngine:
    """Drafts as a log says they go, and takes the time that the costs say; deeper exits cost more and are righter."""

    vocab_size, max_model_len = 100, 2048

    def __init__(self, cfg, clock=None, slow=1.0):
        """slow: how much longer plain decoding takes."""
        self.cfg, self.layer, self.clock, self.slow = cfg, cfg.layer, clock or Clock(), slow
        self.costs = Costs(COSTS.plain, COSTS.draft * cfg.layer / 3, COSTS.verify, COSTS.verify_token)
        log = make(300, seed=cfg.layer)
        worse = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.5 / cfg.layer
        self.log = replace(log, accepted=torch.where(worse, 0, log.accepted))
        self.setting, self.logged = Setting("none", None, cfg.k), 0
        self.asked = []  # (draft length, number of prompts)

    def set_draft_length(self, k):
        self.setting = Setting(self.setting.gate, self.setting.threshold, k)

    def set_gate(self, kind, threshold):
        self.setting = Setting(kind, threshold, self.setting.k)

    @contextmanager
    def recording(self):
        before = len(self.asked)
        yield lambda: self.log
        self.logged = len(self.asked) - before  # requests

    def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
        generation = self.answer(prompts, output_len)
        self.clock.now += generation.seconds
        return generation

    @cache  # noqa: B019 - engines live as long as a test
    def replayed(self, setting):
        return replay(self.log, setting, self.costs)

    def answer(self, prompts, output_len):
        self.asked.append((self.setting.k, len(prompts)))
        outputs = [[0] * output_len for _ in prompts]
        tokens = output_len * len(prompts)
        own = DraftCounters(10).snapshot()
        if not self.setting.k:
            return Generation(outputs, tokens * COSTS.plain * self.slow, [], VerifyCounts(0, 0, 0, []), own)
        outcome = self.replayed(self.setting)
        share = tokens / (outcome.rounds + outcome.accepted)
        seconds = tokens * self.costs.plain / outcome.speedup
        counts = VerifyCounts(outcome.rounds, outcome.drafted, outcome.accepted, [])
        own |= {"rounds": outcome.rounds * share, "seconds": outcome.drafted * self.costs.draft * share}
        own |= dict.fromkeys(("steps", "drafted"), outcome.drafted * share)
        return Generation(outputs, seconds, [], counts, own)


WORK = WorkloadConfig(prompts="random", num_prompts=2, output_len=16, input_len=4)  # needs no text


class Engines:
    """Opens fake engines and remembers them. slow: see `FakeEngine`, by layer. start: called as an engine starts."""

    def __init__(self):
        self.opened, self.clock, self.slow = [], Clock(), {}
        self.start = lambda cfg: None

    @contextmanager
    def __call__(self, cfg):
        self.clock.now += OPENING
        self.start(cfg)
        self.opened.append(FakeEngine(cfg, self.clock, self.slow.get(cfg.layer, 1.0)))
        yield self.opened[-1]
        self.clock.now += 2.0


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
def lab(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "LONGEST", 5)
    cfgs = [RunConfig(layer=layer, workload=WORK, results_dir=str(tmp_path / "results")) for layer in (1, 3, 6, 12)]

    def run(minutes=5000.0, chosen=cfgs, **more):
        budget, conf = tune.Budget(minutes, engines.clock), tmp_path / "conf"
        cfg, document = tune.run(chosen, open_engine=engines, budget=budget, conf=conf, model_words=["model=m"], **more)
        return SimpleNamespace(cfg=cfg, **document)

    return SimpleNamespace(run=run, opened=engines.opened, cfgs=cfgs, folder=tmp_path)


def best_of_grid(cfg):
    engine = FakeEngine(cfg)
    settings = [Setting("none", None, k) for k in range(1, 6)]
    thresholds = product(("maxp", "margin"), range(50), range(2, 6))
    settings += [Setting(gate, limit / 50, k) for gate, limit, k in thresholds]
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
    again = lab.run()
    assert not any(engine.logged for engine in lab.opened[engines:])  # no exit is surveyed again
    assert again.expected == result.expected  # by what was saved


@pytest.mark.parametrize(
    "change", [{"draft_weights": "fp8"}, {"runner": Runner.v1}, {"acceptance_length": 3.0}], ids=str
)
def test_other_drafts_are_logged_and_tried_anew(lab, change):
    """A survey for each, in one folder; what one of them left serves it alone."""
    shared, other = lab.cfgs[1], replace(lab.cfgs[1], **change)
    first = lab.run(chosen=[shared])
    engines, generated = len(lab.opened), sum(len(engine.asked) for engine in lab.opened)
    second = lab.run(chosen=[other])
    assert len(lab.opened) == 2 * engines
    assert sum(len(engine.asked) for engine in lab.opened[engines:]) == generated
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


def test_other_weights_are_surveyed_however_the_first_ended(lab):
    """Two exits in a row that expect less end the survey of their own kind of weights."""
    every = product(("shared", "int8"), (1, 3, 12, 18, 20, 22))
    lab.run(chosen=[replace(lab.cfgs[0], layer=layer, draft_weights=weights) for weights, layer in every])
    seen = {(engine.cfg.draft_weights, engine.layer) for engine in lab.opened}
    assert ("shared", 22) not in seen and ("int8", 1) in seen and ("int8", 22) not in seen


def refusing(engines, refused, meanwhile=lambda: None):
    """Engines of this layer do not start."""

    def start(cfg):
        if cfg.layer == refused:
            meanwhile()
            raise SettingsError(f"draft_context = blocks:1024 is\nnot supported at {cfg.layer}")

    engines.start = start


def test_an_exit_that_cannot_be_had_is_left_out_with_the_reason(lab, engines):
    refusing(engines, 3)
    progress, heard = Progress(), []
    progress.failed = lambda *words: heard.append(words)
    result = lab.run(progress=progress)
    reason = "draft_context = blocks:1024 is not supported at 3"
    assert heard == [("E3-lens", reason)]
    assert result.warnings == [f"E3-lens was left out: {reason}"]
    assert [row["exit"] for row in result.expected] == ["E1-lens", "E6-lens", "E12-lens"]


def test_heads_are_tried_at_the_exits_that_look_promising(lab, engines, monkeypatch):
    tried = []

    def start(cfg):
        if cfg.head.kind != "lens":
            tried.append(cfg.layer)
            if len(tried) == 1:
                raise RuntimeError

    engines.start = start
    monkeypatch.setattr(tune, "_is_fitted", lambda cfg: True)
    monkeypatch.setattr(tune, "NEAR", 0.0)
    result = lab.run(heads=[HeadConfig(), HeadConfig("lsq")])
    best = sorted(result.expected[:4], key=lambda row: -row["speedup"])
    assert [row["exit"] for row in best[:2]] == [f"E{layer}-lens" for layer in tried]
    assert [row["exit"] for row in result.expected][4:] == [f"E{tried[1]}-lsq"]
    assert f"E{tried[0]}-lsq was left out: RuntimeError" in result.warnings


def test_the_first_exit_ends_the_search_where_it_cannot_be_had(lab, engines):
    refusing(engines, 1)
    with pytest.raises(SettingsError, match="not supported at 1"):
        lab.run()
    assert lab.opened == []


def test_an_interrupt_is_no_reason_to_leave_an_exit_out(lab, engines, monkeypatch):
    """An engine whose processes got it too fails in some way of its own."""
    refusing(engines, 3, meanwhile=lambda: monkeypatch.setattr(interrupts, "_waiting", True))
    progress = Progress()
    progress.failed = lambda *words: pytest.fail("an exit was left out")
    with pytest.raises(KeyboardInterrupt):
        lab.run(progress=progress)


def test_no_exit_is_begun_after_half_of_the_time_and_no_engine_after_all_of_it(lab, monkeypatch):
    """The opening of an engine takes all of the time here, so one exit is surveyed, by one request, and a repeat
    measured there."""
    monkeypatch.setattr(tune, "NEAR", 0.0)
    result = lab.run(minutes=OPENING / 60)
    assert [engine.layer for engine in lab.opened] == [1]
    assert result.untried == ["E3-lens", "E6-lens", "E12-lens"] and {row["E"] for row in result.finalists} == {1}
    assert "there was no time for E3-lens, E6-lens, E12-lens; with more --minutes" in result.warnings[0]
    again = lab.run()
    assert not again.untried and len({row["E"] for row in again.finalists}) == tune.ENGINES
    surveyed = [(engine.layer, engine.logged) for engine in lab.opened if engine.logged]
    assert surveyed == [(1, 1), *((layer, tune.RECORDED) for layer in (1, 3, 6, 12))]  # the first in full as well
    assert lab.run(minutes=OPENING / 60).untried == []


def test_a_race_ends_before_the_repeat_that_has_no_time():
    cfg = RunConfig(layer=3, k=5, workload=WorkloadConfig(num_prompts=2, batch=1, output_len=8))
    asked = []

    def another(seconds):
        asked.append(seconds)
        return len(asked) < 2

    settings = [measure.PLAIN, Setting("none", None, 2)]
    measured = measure.run(FakeEngine(cfg), cfg, [[1]] * 2, settings, repeats=5, warmup=1, another=another)
    assert [len(arm.repeats) for arm in measured] == [2, 2]
    assert asked[0] == pytest.approx(sum(part.seconds for arm in measured for part in arm.repeats[0]))


def test_a_stall_in_one_repeat_does_not_enter_the_costs():
    cfg = RunConfig(layer=3, k=10, workload=WorkloadConfig(num_prompts=2, output_len=50))
    settings = [measure.PLAIN, *(Setting("none", None, k) for k in (1, 5, 10))]
    plain, *drafting = measure.run(FakeEngine(cfg), cfg, [[1]] * 2, settings, repeats=2)
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
    engine, settings = FakeEngine(cfg), [measure.PLAIN, Setting("none", None, 2)]
    plain, two = measure.run(engine, cfg, [[1]] * 4, settings, repeats=3, warmup=0)
    order = engine.asked
    assert len(order) == 3 * 2 * 2
    assert all(count == 2 for _, count in order)
    assert {order[0][0], order[1][0]} == {0, 2}
    assert order[0] != order[2]  # who goes first changes
    row = two.to_dict(plain)
    assert row["speedup"] == pytest.approx(two.median / plain.median)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert plain.to_dict(plain)["accept_rate"] is None


def test_heads_that_are_not_fitted_are_not_tried(tmp_path):
    cfg = RunConfig(layer=3, head_dir=str(tmp_path), gate=GateConfig("none"))
    assert tune.with_heads(cfg, [HeadConfig(), HeadConfig("lsq")]) == []


# ---- what roc and tune share -----------------------------------------------------------------------------------------


def test_configs_that_differ_in_gate_threshold_or_length_name_one_exit():
    cfg = RunConfig(layer=3)
    same = [replace(cfg, k=k, threshold=0.2, gate=GateConfig("maxp")) for k in (3, 5)] + [replace(cfg, threshold=0.1)]
    (only,) = exits.distinct(same, 12)
    assert (only.k, only.gate.kind, only.threshold) == (12, "none", None)
    others = [
        cfg,
        replace(cfg, layer=4),
        replace(cfg, vocab="4096"),
        replace(cfg, head=HeadConfig(path="a.safetensors")),
    ]
    assert len(exits.distinct(others, 12)) == 4


def test_roc_records_an_exit_once_too(engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = RunConfig(layer=3, workload=WORK)
    result = roc.run([replace(cfg, k=k) for k in (3, 5)], open_engine=engines, longest=5, prompts=4)
    assert len(engines.opened) == len(result.exits) == 1
    assert engines.opened[0].cfg.k == 5


def test_a_log_fills_the_batch_that_its_steps_are_timed_at(engines):
    cfg = exits.distinct([RunConfig(layer=3, workload=replace(WORK, batch=16, num_prompts=16))], 5)[0]
    exits.survey(cfg, engines, prompts=4)
    assert engines.opened[0].asked[0] == (5, 16)
    assert roc.facts([cfg], longest=12, prompts=4)["prompts"] == 16


@pytest.mark.slow
def test_roc_does_not_choose_an_exit_because_plain_decoding_stalled_under_it(engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfgs = [RunConfig(layer=layer, workload=WORK, k=5) for layer in (3, 6, 12)]
    right = roc.run(cfgs, open_engine=engines, longest=5, prompts=4).best.exit.cfg.layer
    wrong = next(cfg.layer for cfg in cfgs if cfg.layer != right)
    engines.slow[wrong] = 5.0
    assert roc.run(cfgs, open_engine=engines, longest=5, prompts=4).best.exit.cfg.layer == right


def test_levelled_exits_share_the_pace_of_plain_decoding():
    log, setting = make(), Setting("none", None, 3)
    costs = [replace(COSTS, plain=plain) for plain in (6.0, 7.0, 14.0)]
    found = [Exit(RunConfig(layer=3), log, one, (replay(log, setting, one),)) for one in costs]
    levelled = exits.level(found)
    assert {one.costs.plain for one in levelled} == {7.0}
    assert [one.best.speedup for one in levelled] == pytest.approx([replay(log, setting, COSTS).speedup] * 3)


def test_layers_where_the_user_names_none(tmp_path, monkeypatch):
    monkeypatch.setitem(schema.BEST_DRAFTS, str(tmp_path), (3, 4))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 24}')
    cfg = RunConfig(model=ModelConfig(name="m", path=str(tmp_path)))
    assert exits.candidate_layers(cfg, roc.LAYER_PARTS) == [3, 6, 12]
    assert exits.candidate_layers(cfg, tune.LAYER_PARTS) == [2, 3, 4, 6, 12]


def test_each_view_has_exits_of_its_own_where_no_layer_is_named():
    words = ["draft_weights=shared,int8", "skip_layers=null,'10-12'"]
    found = [(cfg.layer, cfg.draft_weights, cfg.skip_layers) for cfg in configs.exits(words, roc.LAYER_PARTS)]
    assert found == [
        *((layer, "shared", None) for layer in (3, 6, 12)),
        (24, "shared", "10-12"),
        *((layer, "int8", None) for layer in (24, 3, 6, 12)),
        (24, "int8", "10-12"),
    ]
    (named,) = configs.exits(["draft_weights=int8", "layer=5"], roc.LAYER_PARTS)
    assert (named.layer, named.draft_weights) == (5, "int8")


def test_a_model_whose_depth_is_unknown_still_has_the_exit_that_it_measured(monkeypatch):
    hub = ModelConfig(name="m", path="facebook/layerskip-llama2-7B")
    monkeypatch.setattr("selfspec_cli.config.facts.config_file", lambda *words, **more: None)
    assert exits.candidate_layers(RunConfig(model=hub), tune.LAYER_PARTS) == [8]
    with pytest.raises(ConfigError, match="name some: layer=4,8"):
        exits.candidate_layers(RunConfig(model=replace(hub, path="org-of-nobody/m")), roc.LAYER_PARTS)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "lens"),
        ({"head": HeadConfig("lsq"), "vocab": "4096"}, "lsq-4096"),
        ({"draft_weights": "fp8"}, "lens-fp8"),
        ({"draft_sample_method": "probabilistic"}, "lens-probabilistic"),
        ({"acceptance_length": 2.5}, "lens-accept2.5"),
    ],
)
def test_the_name_of_an_exit_says_what_is_no_default(change, name):
    assert exits.exit_name(replace(RunConfig(layer=3), **change)) == name


def test_two_vocabularies_of_one_name_are_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", "1 2"), ("b", "3 4"), ("c", "1 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v.txt").write_text(text)
    names = [exits.exit_name(replace(RunConfig(layer=3), vocab=f"{name}/v.txt")) for name in "abc"]
    assert names[0].startswith("lens-v-")
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("gate", features())
@pytest.mark.parametrize("at_stake", [False, True])
def test_the_area_is_the_chance_that_an_accepted_token_scores_higher(gate, at_stake):
    """Against its definition (Mann and Whitney), over all pairs."""
    log = make(40)
    mask = log.was_at_stake if at_stake else log.was_drafted
    score = curves.scores(log, gate)
    score, taken = (score if at_stake else score.cummin(1).values)[mask], log.was_accepted[mask]
    pairs = score[taken].unsqueeze(1) - score[~taken].unsqueeze(0)
    want = float(((pairs > 0).float() + 0.5 * (pairs == 0).float()).mean())
    assert curves.auc(log, gate, at_stake=at_stake) == pytest.approx(want, abs=1e-5)


def test_a_gate_that_tells_nothing_and_one_that_tells_all():
    log = make(60)
    log.statistics[:, :, log.features.index("entropy")] = torch.where(log.was_accepted, 0.1, 3.0)
    assert curves.auc(log, "none") == 0.5
    assert curves.auc(log, "entropy") == 1.0  # low entropy is open


def test_one_fate_has_no_area():
    log = make(10)
    all_right = replace(log, accepted=log.drafted)
    assert curves.auc(all_right, "maxp") is None


def judged(seed=0):
    return roc.judge(Exit(RunConfig(layer=3, k=5), make(400, seed), COSTS))


def test_every_gate_has_a_row_and_a_setting():
    found = judged()
    rows = roc.table(found)
    assert [row.gate for row in rows] == [gate for gate in GATES if gate != "auto"]  # it is none in a replay
    for row in rows:
        assert row.best_fixed_speedup == rows[0].expected_speedup
        assert (row.threshold is None) == (row.gate == "none")
        assert row.expected_speedup <= found.oracle.speedup + 1e-9
    assert found.exit.best.speedup == max(row.expected_speedup for row in rows)


@pytest.mark.slow
def test_files_and_what_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = judged()
    result = roc.RocResult(roc.table(found), [found])
    files = roc.write(result, tmp_path / "roc")
    drawn = report.roc_figures(tmp_path / "roc")
    assert [Path(file).stat().st_size > 10_000 for file in drawn.values()] == [True, True]
    panels = json.loads(Path(files["curves"]).read_text())["panels"]
    for panel in panels:
        assert [curve["false"][0] for curve in panel["curves"]] == [0.0] * len(panel["curves"])
        assert {(curve["false"][-1], curve["true"][-1]) for curve in panel["curves"]} == {(1.0, 1.0)}
        assert max(len(curve["true"]) for curve in panel["curves"]) <= 150
        first, at_stake = panel["curves"][0], panel["of"] == roc.ASKED[True]
        assert first["auc"] == curves.auc(found.judged, first["gate"], at_stake=at_stake)
    with open(files["table"], encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["gate"] for row in table] == [gate for gate in GATES if gate != "auto"]
    assert table[0]["threshold"] == ""
    words = result.choice()["overrides"]
    assert words[0] == "layer=3"
    assert any(word.startswith("gate=") for word in words)


def test_exits_that_differ_in_their_drafts_alone_are_told_apart():
    found = judged()
    fp8 = replace(found.exit.cfg, draft_weights="fp8")
    other = replace(found, exit=replace(found.exit, cfg=fp8))
    result = roc.RocResult([*roc.table(found), *roc.table(other)], [found, other])
    assert {row.head for row in result.rows} == {"lens", "lens-fp8"}
    assert "draft_weights=fp8" in replace(result, exits=[other]).choice()["overrides"]
    assert "head=lens" in result.choice()["overrides"]
