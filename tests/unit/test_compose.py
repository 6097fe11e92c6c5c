import errno
import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer
import yaml
from commands import one, refusal
from refusals import said

from selfspec_cli.commands.app import app
from selfspec_cli.commands.screen import BAD_INPUT, RUN_FAILED, guard
from selfspec_cli.config import compose, paths, schema, tuned
from selfspec_cli.config.choices import NAMED_GROUPS, choices, experiment_files, unread_files
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.dumped import load_config
from selfspec_cli.config.keys import Keys, digest
from selfspec_cli.config.schema import GROUPS, ConfigError, Method, RunConfig, dump, resolved, to_plain
from selfspec_cli.config.words import parse
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.stages.replicas import asked


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test runs in a folder of its own, as a user of the wheel would."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tuned_models(elsewhere):
    """What `selfspec tune` leaves, for the models that examples name; tuned files are not part of a checkout."""
    words = ["layer=3", "k=12", "gate=margin", "threshold=0.136"]
    for name in ("reference", "llama3_8b"):
        tuned.write(elsewhere / "conf", one(f"model={name}"), [f"model={name}", *words], "")


NGRAM = ("method=vllm", "speculative=ngram")
DRAWN = "draft_sample_method=probabilistic"
DRAFT_MODEL = ["model=llama3_8b_shape", "perplexity_tokens=0", "workload.prompts=random", "method=draft_model"]


def test_without_overrides_every_default_is_the_schemas():
    assert one() == resolved(RunConfig())


@pytest.mark.slow
def test_every_choice_composes_and_is_called_by_its_name():
    for group in set(GROUPS) - {"speculative"}:  # for which see test_speculative.py
        assert GROUPS[group] in choices(group)
        for name in choices(group):
            part = getattr(one(f"{group}={name}"), group)
            if group == "engine":
                continue  # it composes; only its device says which it is
            word = schema.head_spec(part).name if group == "head" else getattr(part, "kind", None)
            assert name in (getattr(part, "name", None), word)


def test_the_choices_of_gates_and_heads_are_the_registries():
    assert choices("gate") == list(GATES)
    assert not any(file.stem in NAMED_GROUPS for file in (paths.data_dir() / "conf").iterdir())
    head = one("head=translator_r7_bias").head
    assert (head.kind, head.rank, head.bias) == ("translator", 7, True)
    assert "a head of kind lens has no bias" in refusal("head=lens_bias")
    assert "did you mean 'translator'" in refusal("head=translator_kl")
    assert "did you mean 'translator_r15'" in refusal("head=translater_r15")


@pytest.mark.parametrize(
    ("overrides", "unused", "users"),
    [
        (["tau_v=4,5,6"], "tau_v=4,5,6 is not used by gate 'none', which takes no threshold", "that use tau_v: varH"),
        (["tau_v=5"], "tau_v=5 is not used by gate 'none'", "varH"),  # what it is without a word, but asked for
        (["gate=none,maxp", "tau=0.2", "threshold=0.5"], "tau=0.2 and threshold=0.5: both are threshold", "one of"),
        (["draft_window=64", "draft_context=full"], "draft_window=64 and draft_context=full: both are", "one of them"),
        (["method=skip", "gate=maxp", "tau=0.3"], "gate=maxp is not used by method 'skip'", "layer_skip"),
        (["method=skip,layer_skip", "tau=0.3"], "tau=0.3 is not used by gate 'none'", "margin, maxp, survival"),
        (["method=skip", "engine=gpu", "acceptance_length=3"], "acceptance_length=3 is not used", "layer_skip, draft"),
        ([*NGRAM, "head.path=x.pt"], "head.path=x.pt is not used by method 'vllm'", "layer_skip, skip"),
        ([*DRAFT_MODEL, "vocab=4096"], "vocab=4096 is not used by method 'draft_model'", "layer_skip, skip"),
        (["method=baseline", DRAWN], f"{DRAWN} is not used by method 'baseline'", "layer_skip, draft_model"),
        (["tau=0.1,0.2", "gate=maxp,varH"], "by gate 'varH', which takes tau_v or threshold", "that use tau: ada"),
        (["experiment=m4_varh", "gate=maxp"], "tau_v=4,5,6 is not used by gate 'maxp'", "varH"),
        (["launcher.workers=2"], "launcher.workers=2 with launcher=", "joblib|submitit|ray|sky"),
        (["launcher=ray", "launcher.bucket=mine"], "launcher.bucket=mine with launcher=", "sky"),
    ],
)
def test_a_setting_that_no_point_uses_is_refused(tuned_models, overrides, unused, users):
    message = refusal(*overrides)
    assert unused in message
    assert users in message


@pytest.mark.parametrize(
    ("overrides", "points"),
    [
        (["gate=none,maxp", "tau=0.2,0.4"], 3),
        (["experiment=m3_maxp", "threshold=0.5"], 1),
        (["method=skip,layer_skip", "gate=maxp", "tau=0.3", "k=3"], 2),
        (["method=baseline,layer_skip", "draft_sample_method=greedy,probabilistic"], 3),
        (["method=baseline,skip", "draft_sample_method=greedy"], 2),  # asks for nothing
        (["method=baseline", "layer=null", "gate=none"], 1),
        (["method=skip", "gate=none", "vocab=full", "k=null", "tau=null"], 1),  # asks for nothing
        (["tuned=reference", "method=skip"], 1),
    ],
)
def test_a_setting_that_a_point_uses_or_that_asks_for_nothing_is_fine(tuned_models, overrides, points):
    assert len(compose_runs(None, overrides)) == points


def examples():
    """The overrides of every command that the README files, docs/ and `--help` show, but for placeholders."""
    texts = [command.epilog or "" for command in app.registered_commands]
    root = Path(__file__).parents[2]
    written = sorted((root / "docs").glob("*.md"))
    pages = [root / "README.md", root / "ee_head" / "README.md", *written]
    texts += [page.read_text(encoding="utf-8") for page in pages]
    commands = "sweep|bench|load|fit|fit-weights|heads|roc|tune|serve|verify|ppl|eval|doctor"
    shown = re.findall(rf"selfspec (?:{commands}) ([^`#·\n]*)", "\n".join(texts))
    shown = [re.sub(r"--slo \S+", "", words) for words in shown]
    found = {tuple(word for word in shlex.split(words) if re.fullmatch(r"[\w.]+=.+", word)) for words in shown}
    found = {tuple(asked(words)[2]) for words in found}  # `selfspec serve` takes replicas=N out
    # Files and folders that only the reader has.
    mine = re.compile(r"=(FILE|MODEL|\.\.\.|.*my_model|/models/mine)$|^experiment=mine$")
    of_serve = re.compile(r"^(replicas|router)=")  # no settings of a run
    chosen = {tuple(word for word in words if not of_serve.search(word)) for words in found}
    return sorted(words for words in chosen if words and not any(mine.search(word) for word in words))


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_every_example_composes(tuned_models, words):
    assert compose_runs(None, words)


def test_one_command_has_one_results_folder_head_folder_and_tracker(elsewhere):
    assert refusal("results_dir=a,b") == "results_dir=a,b: one command takes one value of it"
    assert "head_dir=a,b: one command" in refusal("head=lsq", "head_dir=a,b")
    assert "tracker.kind=none,wandb: one command" in refusal("tracker=none,wandb")
    write(elsewhere, "experiments/own.yaml", "overrides: []\ngrids: [[results_dir=a], [results_dir=b]]\n")
    assert "results_dir=a,b: one command" in refusal("experiment=own")


def test_every_launcher_setting_that_is_not_of_all_says_whose_it_is():
    assert {"kind"} | set(schema.LAUNCHERS_WITH) == {item.name for item in fields(schema.LauncherConfig)}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("k=range(5,3)", "a range without a value"),
        ("tau=range(0.1,inf,0.1)", "or without an end"),
        ("method=glob(*)", "has no list of values"),
        ("method=interval(0,1)", "has no list of values"),
    ],
)
def test_a_sweep_without_a_list_of_values_is_refused_as_it_was_typed(override, reason):
    message = refusal(override)
    assert message.startswith(f"{override}: ")
    assert reason in message


def test_published_experiments_are_the_promised_grids():
    grid = {name: compose_runs(name) for name in experiment_files()}
    assert [cfg.threshold for cfg in grid["m3_maxp"]] == [0.30, 0.35, 0.40]
    assert [cfg.threshold for cfg in grid["m4_varh"]] == [4, 5, 6]
    assert {cfg.method for cfg in grid["m1_skip"]} == {Method.skip}
    assert len({cfg.layer for cfg in grid["m1_skip"]}) > 1
    assert {cfg.head.kind for cfg in grid["m2_lsq"]} == {"lsq"}
    assert [cfg.method for cfg in grid["m0_baseline"]] == [Method.baseline]
    assert "m0_sanity" in grid


def test_the_header_of_an_experiment_is_its_command():
    for name, file in experiment_files().items():
        first = file.read_text().splitlines()[0]
        assert re.search(rf"selfspec (sweep|bench|load) experiment={name}( --[a-z-]+)*$", first), name


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("tua=0.3", "'tau'"),
        ("gate.knd=maxp", "'gate.kind'"),
        ("method=layerskip", "'layer_skip'"),
        ("experiment=m4_varH", "'m4_varh'"),
        ("head=lens,lzq", "'lsq'"),
    ],
)
def test_a_misspelling_names_the_nearest(override, nearest):
    message = refusal(override)
    assert f"did you mean {nearest}" in message
    assert "allowed:" in message


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("k=five", "no whole number"),
        ("~k", "only key=value overrides"),
        ("gate@x=none", "only key=value overrides"),
        ("engine.enforce_eager=maybe", "not a valid bool"),
        ("model=[a]", "is not known"),
        ("k=", "no whole number"),
        ("=3", "key '' is not known"),
        ("results_dir=[1]", "results_dir"),
        ("model.name=[1,2]", "Cannot convert 'list' to string"),
        ("results_dir=${oc.env:SELFSPEC_NOWHERE}", "'SELFSPEC_NOWHERE' not found"),
        ("layer=[1,", "no viable alternative"),
        ("layer", "write key=value"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line_or_two(typed, words):
    message = refusal(typed)
    assert words in message and typed.partition("=")[0] in message
    assert len(message.splitlines()) <= 3
    assert "Traceback" not in message


def test_one_point_commands_refuse_lists():
    assert "selfspec sweep" in refusal("k=1,2", sweep=False)
    assert "selfspec sweep" in refusal("experiment=m4_varh", sweep=False)
    assert "selfspec sweep" in refusal("experiment=m0_sanity,m0_baseline", sweep=False)


def test_a_model_may_be_a_folder_or_a_hub_id(elsewhere):
    (elsewhere / "my model's").mkdir()
    cfg = one(f"model='{elsewhere}/my model\\'s'")
    assert (cfg.model.path, cfg.model.name) == (f"{elsewhere}/my model's", "my model's")
    cfg = one("model=someone/Some-Model-7B", "model.dtype=float32")
    assert cfg.model.path == cfg.model.name == "someone/Some-Model-7B" and cfg.model.dtype == "float32"
    paths_ = [cfg.model.path for cfg in compose_runs(None, ["model=reference,someone/x"])]
    assert paths_ == ["reference", "someone/x"]
    (elsewhere / "org" / "name").mkdir(parents=True)  # named like an id of the hub
    found = said(ConfigError, paths.model_path, one("model=org/name").model)
    assert "path=org/name: org/name holds no config.json" in found


def test_the_control_of_the_reference_model_is_in_the_repository_alone(elsewhere, monkeypatch):
    cfg = one("model=reference_plain", "draft_weights=int8")
    assert Path(paths.model_path(cfg.model)) == paths.plain_model_dir() != paths.reference_model_dir()
    assert sum(file.stat().st_size for file in paths.plain_model_dir().iterdir()) < 32_000_000
    monkeypatch.setattr(paths, "data_dir", lambda: elsewhere)  # an installed package
    missing = "comes with the repository, not with the package: there is no folder"
    assert missing in said(ConfigError, paths.model_path, cfg.model)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["gate=varH", "tau_v=4.5", "layer=4", "vocab=4096"],
        ["model.hf_overrides={a: none, b: [1, null, 'no'], c: 1e-05}", "engine.extra.x='1'", "gate=maxp", "tau=1e-7"],
        ["method=vllm", 'speculative={"method": "ngram", "prompt_lookup_max": 3}'],
    ],
)
def test_a_dumped_config_reloads_to_the_identical_config(overrides, elsewhere):
    (cfg,) = compose_runs(None, overrides)
    file = elsewhere / "config.yaml"
    file.write_text(dump(cfg))
    assert load_config(file) == cfg
    assert compose_runs(None, [], config=file) == [cfg]


def test_overrides_apply_on_top_of_a_dumped_config(elsewhere):
    file = elsewhere / "config.yaml"
    file.write_text(dump(one("model=llama3_8b", "gate=varH", "layer=4")))
    (cfg,) = compose_runs(None, ["model=reference", "k=3"], config=file)
    assert cfg == one("gate=varH", "layer=4", "k=3")
    file.write_text(dump(one(*NGRAM)))
    (deeper,) = compose_runs(None, ["speculative.prompt_lookup_max=5"], config=file)
    assert deeper.speculative == one(*NGRAM).speculative | {"prompt_lookup_max": 5}


def write(folder, name, text):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_users_conf_and_experiments_add_and_replace_choices(elsewhere):
    write(elsewhere, "conf/gate/mine.yaml", "kind: maxp\n")
    write(elsewhere, "conf/workload/headline.yaml", "name: headline\ninput_len: 7\n")
    runs = compose_runs(None, ["gate=mine,varH"])
    assert [(cfg.gate.kind, cfg.workload.input_len) for cfg in runs] == [("maxp", 7), ("varH", 7)]
    assert "mine" in refusal("gate=mone")
    write(elsewhere, "experiments/own.yaml", "overrides: [gate=maxp, 'tau=0.1,0.2']\n")
    write(elsewhere, "experiments/m4_varh.yaml", "overrides: [gate=varH, tau_v=9]\n")
    assert [cfg.threshold for cfg in compose_runs("own")] == [0.1, 0.2]
    assert [cfg.threshold for cfg in compose_runs("m4_varh")] == [9]


@pytest.mark.parametrize("text", ["- a\n", "overrides: gate=varH\n", "overides: []\noverrides: []\n", "overrides: [\n"])
def test_an_experiment_of_another_shape_is_refused(elsewhere, text):
    write(elsewhere, "experiments/bad.yaml", text)
    assert "bad.yaml" in refusal("experiment=bad")


def test_from_a_wheel_the_packaged_data_is_found(elsewhere, monkeypatch):
    write(elsewhere, "wheel/conf/engine.yaml", "cpu: {device: cpu}\n")
    monkeypatch.setattr(paths, "data_dir", lambda: elsewhere / "wheel")
    assert choices("engine") == ["cpu"]
    assert refusal("engine=gpu,cpu").startswith("engine 'gpu' is not known; allowed: cpu")


def test_exit_layer_and_draft_length_come_from_the_user_then_the_model_then_the_schema():
    assert (one().layer, one().k) == (3, 4)
    assert (one("layer=6", "k=2").layer, one("layer=6", "k=2").k) == (6, 2)
    assert (one("model=llama3_8b").layer, one("model=llama3_8b").k) == (None, 5)
    assert (one("model=layerskip_llama2_7b").layer, one("model=llama3_8b_shape").k) == (8, 3)


def test_tuned_goes_before_the_users_own_and_after_nothing(elsewhere):
    tuned.write(elsewhere / "conf", one(), ["layer=6", "k=7", "gate=margin", "threshold=0.2"], "a title")
    assert one("tuned=reference") == resolved(RunConfig(layer=6, k=7, gate=schema.GateConfig("margin"), threshold=0.2))
    assert [cfg.k for cfg in compose_runs(None, ["tuned=reference", "k=2,3"])] == [2, 3]
    assert "selfspec tune model=other" in refusal("tuned=other")


@pytest.mark.parametrize(
    "words",
    [
        "gate=margin threshold=0.5 head=lsq",
        "k=4 gate=maxp threshold=0.3 length_table='1:4 8:2 8@4096:0'",
        "draft_weights=int8 skip_layers=2-3 draft_window=64",
        "draft_sample_method=probabilistic free_drafts=8",
        "runner=v1 head_dir=mine",
    ],
)
def test_what_tuning_writes_composes_to_what_it_measured(elsewhere, words):
    cfg = one("layer=6", *shlex.split(words))
    written = tuned.overrides(cfg)
    tuned.write(elsewhere / "conf", cfg, written, "")
    assert one("tuned=reference") == cfg
    assert tuned.overrides(one("layer=3", "k=4")) == ["layer=3", "k=4", "head=lens", "vocab=full", "gate=none"]


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("ergebnisse/größe", "ergebnisse/größe"),
        ("a\\,b", "a,b"),
        ("'a,b'", "a,b"),
        ("a\\", "a\\"),
        ("${oc.env:SELFSPEC_NOWHERE,out}", "out"),
        ("${oc.env:SELFSPEC_NOWHERE,${oc.env:SELFSPEC_HERE}}/ä b", "/tmp/höme, x/ä b"),
        ("of-${workload.num_prompts}", "of-16"),
        (r"\${oc.env:SELFSPEC_NOWHERE}", "${oc.env:SELFSPEC_NOWHERE}"),  # as it stands
        ("$HOME/a{b}", "$HOME/a{b}"),
    ],
)
def test_text_is_written_as_a_shell_user_types_it_and_takes_interpolations(monkeypatch, typed, folder):
    monkeypatch.setenv("SELFSPEC_HERE", "/tmp/höme, x")
    monkeypatch.delenv("SELFSPEC_NOWHERE", raising=False)
    assert one(f"results_dir={typed}", "workload.num_prompts=16").results_dir == folder


def test_a_list_of_paths_is_a_sweep_and_a_comma_inside_one_is_escaped(elsewhere):
    for name in ("modèle", "b c", "d,e"):
        (elsewhere / name).mkdir()
    assert one(f"model={elsewhere}/modèle").model.path == f"{elsewhere}/modèle"
    runs = compose_runs(None, [f"model={elsewhere}/modèle,{elsewhere}/b c,{elsewhere}/d\\,e"])
    assert [cfg.model.name for cfg in runs] == ["modèle", "b c", "d,e"]
    assert [cfg.model.name for cfg in compose_runs(None, ["model=orgA/M,orgB/M"])] == ["orgA/M", "orgB/M"]


def test_a_key_that_is_given_twice_is_refused():
    assert refusal("layer=3", "k=2", "layer=4").startswith("layer=3 and layer=4: layer is given twice")
    assert "gate is given twice" in refusal("gate=maxp", "gate=varH")


@pytest.mark.slow
def test_ten_thousand_points_are_composed_once():
    composed, converted = [], []
    with pytest.MonkeyPatch.context() as patch:
        compose_files, convert = compose._Composed, compose._converted
        patch.setattr(compose, "_COMPOSED", {})
        patch.setattr(compose, "_Composed", lambda chosen: composed.append(chosen) or compose_files(chosen))
        patch.setattr(compose, "_converted", lambda word, value: converted.append(value) or convert(word, value))
        runs = compose_runs(None, ["gate=maxp", "tau=range(0,1,0.01)", "layer=range(1,11)", "k=range(1,11)"])
    assert len(runs) == 10_000
    assert (len(composed), len(converted)) == (1, 100 + 10 + 10)


def test_a_file_that_refers_to_another_setting_follows_it(elsewhere):
    runs = compose_runs(None, ["workload=decode", "workload.batch=2,4", "seed=1,2"])
    found = [(cfg.workload.batch, cfg.workload.num_prompts, cfg.seed) for cfg in runs]
    assert found == [(2, 2, 1), (2, 2, 2), (4, 4, 1), (4, 4, 2)]
    write(elsewhere, "conf/workload/long.yaml", "name: long\noutput_len: ${k}\n")
    assert [cfg.workload.output_len for cfg in compose_runs(None, ["k=2,3", "workload=long"])] == [2, 3]
    assert one("workload.num_prompts=${workload.batch}", "workload.batch=3").workload.num_prompts == 3


def test_what_is_not_read_in_conf_is_named(elsewhere):
    assert unread_files() == []
    write(elsewhere, "conf/gaet/mine.yaml", "kind: maxp\n")
    write(elsewhere, "conf/gate/mine.yml", "kind: maxp\n")
    write(elsewhere, "conf/head/mine.yaml", "kind: lsq\n")
    write(elsewhere, "conf/engine.yaml", "mine: {device: cpu, max_num_seqs: 3}\ndevice: cpu\n5: {}\n")
    write(elsewhere, "conf/model.yaml", "# nothing\n")
    write(elsewhere, "conf/workload/usual.yaml", "")
    write(elsewhere, "conf/modle.yaml", "{}\n")
    engine, gaet, mine, model = unread_files()
    assert "./conf/engine.yaml: device, 5 is not read" in engine
    assert "usual" in choices("workload") and "device" not in choices("engine")
    assert "./conf/gaet/" in gaet and "did you mean 'gate'?" in gaet
    assert "./conf/gate/mine.yml" in mine
    assert "./conf/modle.yaml" in model
    assert one("head=mine").head.kind == "lsq"
    assert one("engine=mine").engine.max_num_seqs == 3


def test_a_config_of_an_earlier_version_is_read_where_it_asks_for_what_there_is(tmp_path):
    """By other names of settings, and with settings that are gone, most of them at what asks for nothing."""
    cfg = one("layer=3", "gate=varH", "tau_v=6", "draft_window=64", "engine.extra.async_scheduling=false")
    old = to_plain(cfg) | {"threshold": None, "tau": 0.3, "tau_v": 6.0, "draft_context": "full", "draft_window": 64}
    old |= {"verification": "full", "verification_from": None, "read_first": True, "bandit": False}
    old["engine"] |= {"name": "h100", "nvtx": False, "enable_chunked_prefill": None}
    old["engine"] |= {"extra": {}, "async_scheduling": False}
    old["model"] |= {"exit_layer": 8, "draft_length": None, "pipeline_parallel_size": 1}
    old["launcher"] |= {"tries": 2, "address": None, "cluster": "slurm", "partition": None, "minutes": 240}
    old["tracker"] |= {"project": "mine", "entity": None}
    old["load"] |= {"e2e_limit": None, "category": "category"}
    old["gate"]["calibration"], old["head"]["kl"] = None, False
    for name, text in (("point.json", json.dumps({"config": old})), ("config.yaml", yaml.safe_dump(old))):
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name) == cfg
    for section, name, kind in (("head", "kl", "HeadConfig"), ("engine", "nvtx", "EngineConfig")):
        asking = old | {section: old[section] | {name: True}}
        (tmp_path / "asking.yaml").write_text(yaml.safe_dump(asking))
        unknown = f"asking.yaml: Key '{name}' not in '{kind}'"
        assert unknown in said(ConfigError, load_config, tmp_path / "asking.yaml")
    (tmp_path / "asking.yaml").write_text("tua: 3\n")
    assert "tua" in refusal(config=tmp_path / "asking.yaml")
    assert "cannot read" in refusal(config=tmp_path / "missing.yaml")


def test_a_point_that_was_measured_with_a_setting_that_is_gone_keeps_its_key():
    cfg = one("layer=3")
    before = to_plain(cfg)["engine"] | {"nvtx": False, "enable_chunked_prefill": None, "async_scheduling": None}
    del before["device"]
    assert Keys()._part(cfg, "engine") == digest(before)


def test_the_embedded_model_may_be_a_package_of_its_own(tmp_path, monkeypatch):
    """As in an install without a checkout."""
    monkeypatch.setattr(paths, "experiments_dir", lambda: tmp_path / "no_checkout")
    assert "selfspec-reference-model" in said(ConfigError, paths.model_path, RunConfig().model)
    (tmp_path / "selfspec_reference_model" / "model").mkdir(parents=True)
    (tmp_path / "selfspec_reference_model" / "model" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    assert paths.model_path(RunConfig().model) == str(tmp_path / "selfspec_reference_model" / "model")


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        ("0.1,0.4,0.1", (0.1, 0.2, 0.3)),  # a sum of three times 0.1 is above 0.3, and so is not at the stop yet
        ("0.4,0.1,-0.1", (0.4, 0.3, 0.2)),
        ("0.1,0.30000001,0.1", (0.1, 0.2, 0.3)),  # the stop is above the third by what was written
        ("4,13,4", (4, 8, 12)),
    ],
)
def test_a_range_ends_before_its_stop(typed, numbers):
    assert parse([f"tau=range({typed})"])[0].values == numbers
    assert [*map(type, parse([f"tau=range({typed})"])[0].values)] == [*map(type, numbers)]
    assert sorted(parse([f"tau=shuffle(range({typed}))"])[0].values) == sorted(numbers)


@pytest.mark.parametrize("key", ["model", "model.path"])
@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("https://hub.example/Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("https://hub.example/Qwen/Qwen2.5-0.5B/tree/main", "Qwen/Qwen2.5-0.5B"),
        ("hub.example/a/b", "a/b"),
        ("hf://a/b", "a/b"),
        ("s3://bucket/model", "./FOLDER"),
    ],
)
def test_the_address_of_a_model_is_answered_with_the_word_for_it(key, word, instead):
    message = said(ConfigError, lambda: paths.model_path(one(f"{key}={word}").model))
    assert message.endswith(f"write {key}={instead}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"5\n", "must be a mapping"),
        (b"true", "must be a mapping"),
        (b"\xff\xfe", "cannot be read"),
        (b"knd: maxp\n", "'kind'"),
        (b"kind: maxq\n", "maxq"),
    ],
)
def test_a_bad_choice_of_the_users_is_named(elsewhere, content, words):
    write(elsewhere, "conf/gate/mine.yaml", "")
    (elsewhere / "conf" / "gate" / "mine.yaml").write_bytes(content)
    message = refusal("gate=mine")
    assert words in message and ("mine.yaml" in message or b"kind: maxq" in content)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR])
@pytest.mark.parametrize(
    ("place", "ours"),
    [
        ("out", True),
        ("out/logs/a.log", True),
        ("results/runs/a", True),
        ("above", True),
        ("mine/runs/a", False),
        ("/elsewhere/program", False),
        (None, False),
    ],
)
def test_only_a_folder_of_this_command_is_to_be_made_writable(monkeypatch, capsys, number, place, ours):
    folder = "above/out" if place == "above" else "out"
    monkeypatch.setattr("sys.argv", ["selfspec", "bench", f"results_dir={folder}"])
    with pytest.raises(typer.Exit) as ended, guard(as_json=False, debug=False):
        raise OSError(number, os.strerror(number), place)
    assert ended.value.exit_code == (BAD_INPUT if ours else RUN_FAILED)
    shown = capsys.readouterr().err
    assert os.strerror(number) in shown and ("make this one writable" in shown) == ours


def test_a_full_disk_is_no_crash(capsys):
    with pytest.raises(typer.Exit) as ended, guard(as_json=False, debug=False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/summary.csv")
    assert ended.value.exit_code == BAD_INPUT
    assert "/elsewhere/summary.csv: No space left on device; free some space" in capsys.readouterr().err
