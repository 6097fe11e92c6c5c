"""What roc and tune share: which exits are meant, what is logged there, how they are compared."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from test_early_exit_replay import COSTS, make
from test_tune import Clock, FakeEngine

from selfspec_cli.commands import configs
from selfspec_cli.config import schema
from selfspec_cli.config.schema import (
    ConfigError,
    GateConfig,
    HeadConfig,
    ModelConfig,
    RunConfig,
    WorkloadConfig,
)
from selfspec_cli.early_exit.replay import Setting, replay
from selfspec_cli.stages import exits, roc, tune

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
    assert roc.facts([cfg], prompts=4)["prompts"] == 16


@pytest.mark.slow
def test_roc_does_not_choose_an_exit_because_plain_decoding_stalled_under_it(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfgs = [RunConfig(layer=layer, workload=WORK, k=5) for layer in (3, 6, 12)]
    right = roc.run(cfgs, open_engine=opened, longest=5, prompts=4).best.exit.layer
    wrong = next(cfg.layer for cfg in cfgs if cfg.layer != right)
    opened.slow[wrong] = 5.0
    assert roc.run(cfgs, open_engine=opened, longest=5, prompts=4).best.exit.layer == right


def test_levelled_exits_share_the_pace_of_plain_decoding():
    log, setting = make(), Setting("none", None, 3)
    costs = [replace(COSTS, plain=plain) for plain in (6.0, 7.0, 14.0)]
    found = [exits.Exit(RunConfig(layer=3), log, one, (replay(log, setting, one),)) for one in costs]
    levelled = exits.level(found)
    assert {one.costs.plain for one in levelled} == {7.0}
    assert [one.best.speedup for one in levelled] == pytest.approx([replay(log, setting, COSTS).speedup] * 3)


def test_an_exit_that_was_saved_is_the_same(tmp_path):
    found = exits.Exit(RunConfig(layer=3, k=5), make(), COSTS)
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
