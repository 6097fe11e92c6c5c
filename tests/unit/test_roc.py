"""What roc and tune share (which exits are meant, what is logged there, how they are compared), and ROC curves."""

import csv
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_early_exit_replay import COSTS, make
from test_tune import Clock, FakeEngine

from selfspec_cli.commands import configs
from selfspec_cli.config import schema
from selfspec_cli.config.schema import ConfigError, GateConfig, HeadConfig, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import replay as curves
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.replay import Setting, replay
from selfspec_cli.report import make as report
from selfspec_cli.stages import exits, roc, tune
from selfspec_cli.stages.exits import Exit

WORK = WorkloadConfig(prompts="random", num_prompts=2, output_len=16, input_len=4)


@pytest.fixture
def opened(tmp_path):
    """Fake engines by exit layer; plain decoding is slower under those of `slow`."""
    engines, slow = [], {}

    class Engine(FakeEngine):
        def generate(self, prompts, output_len, **options):
            generation = super().generate(prompts, output_len, **options)
            self.largest = max(getattr(self, "largest", 0), len(prompts))
            if not self.setting.k:
                generation.seconds *= slow.get(self.layer, 1.0)
            return generation

    @contextmanager
    def open_engine(cfg):
        engines.append(Engine(cfg, Clock()))
        yield engines[-1]

    open_engine.engines, open_engine.slow = engines, slow
    return open_engine


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


def test_roc_records_an_exit_once_too(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = RunConfig(layer=3, workload=WORK)
    result = roc.run([replace(cfg, k=k) for k in (3, 5)], open_engine=opened, longest=5, prompts=4)
    assert len(opened.engines) == len(result.exits) == 1
    assert opened.engines[0].cfg.k == 5


def test_a_log_fills_the_batch_that_its_steps_are_timed_at(opened):
    cfg = exits.distinct([RunConfig(layer=3, workload=replace(WORK, batch=16, num_prompts=16))], 5)[0]
    exits.survey(cfg, opened, prompts=4)
    assert opened.engines[0].largest == 16
    assert roc.facts([cfg], longest=12, prompts=4)["prompts"] == 16


@pytest.mark.slow
def test_roc_does_not_choose_an_exit_because_plain_decoding_stalled_under_it(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfgs = [RunConfig(layer=layer, workload=WORK, k=5) for layer in (3, 6, 12)]
    right = roc.run(cfgs, open_engine=opened, longest=5, prompts=4).best.exit.cfg.layer
    wrong = next(cfg.layer for cfg in cfgs if cfg.layer != right)
    opened.slow[wrong] = 5.0
    assert roc.run(cfgs, open_engine=opened, longest=5, prompts=4).best.exit.cfg.layer == right


def test_levelled_exits_share_the_pace_of_plain_decoding():
    log, setting = make(), Setting("none", None, 3)
    costs = [replace(COSTS, plain=plain) for plain in (6.0, 7.0, 14.0)]
    found = [Exit(RunConfig(layer=3), log, one, (replay(log, setting, one),)) for one in costs]
    levelled = exits.level(found)
    assert {one.costs.plain for one in levelled} == {7.0}
    assert [one.best.speedup for one in levelled] == pytest.approx([replay(log, setting, COSTS).speedup] * 3)


def test_an_exit_that_was_saved_is_the_same(tmp_path):
    found = Exit(RunConfig(layer=3, k=5), make(), COSTS)
    exits.save(found, tmp_path / "drafts.pt")
    again = exits.load(found.cfg, tmp_path / "drafts.pt")
    assert again.costs == found.costs
    assert again.log.statistics.equal(found.log.statistics)
    assert list(tmp_path.iterdir()) == [tmp_path / "drafts.pt"]


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


# ---- roc


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
