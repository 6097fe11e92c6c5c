"""What commands say to a user's words: the line to type, what would be done, and what is without effect."""

from dataclasses import replace

import pytest
from commands import call, document, done, model_folder, refused

from selfspec_cli.commands import serve
from selfspec_cli.commands.doctor import verdict
from selfspec_cli.commands.screen import in_words
from selfspec_cli.config import paths
from selfspec_cli.config.schema import ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.stages import doctor, preflight

CHECKS = paths.experiments_dir() / "checks"


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"model={model_folder(tmp_path / 'model', num_hidden_layers=8, max_position_embeddings=1024)}"


@pytest.mark.parametrize("command", ["sweep", "bench"])
def test_a_command_alone_shows_its_plan_and_what_to_type(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("selfspec_cli.engine.live.open_engine", lambda *_, **__: pytest.fail("an engine was started"))
    shown = call(command)
    assert shown.exit_code == 0 and shown.stdout.startswith("2 point(s) on 2 engine(s)")
    assert f"to measure it: selfspec {command} model=reference" in shown.stderr
    assert document(call(command, "--json"))["dry_run"] is True
    assert not (tmp_path / "results").exists()
    assert "alone starts nothing" not in call(command, "model=reference", "--dry-run").stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("runs", "results_dir=X"), "selfspec runs list results_dir=X"),
        (("runs", "speedup>1.5", "--json"), "selfspec runs list 'speedup>1.5' --json"),
        (("runs", "shwo"), "did you mean 'show'?"),
        (("compare", "a", "b"), "selfspec report --compare a b"),
        (("gate", "FILE"), "selfspec check FILE"),
        (("pull", "model=org/name"), "hf download MODEL"),
        (("doctr",), "did you mean 'doctor'?"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_line_to_type(words, line):
    assert line in refused(*words)


def test_what_is_not_here_is_said_to_be_not_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("selfspec_cli.stages.preflight.config_file", lambda model: None)
    shown = done("sweep", "model=org/name", "layer=99", "--dry-run")
    assert "are not checked: org/name is not here (hf download org/name)" in shown.stderr
    check = doctor._settings(RunConfig(model=ModelConfig(path="org/name")))
    assert check.ok is None and "not checked: org/name is not here" in check.detail
    assert verdict([check]) == "A run could work here; what depends on the model is not checked."
    assert verdict([replace(check, ok=True)]) == "A run could work here."
    assert verdict([check, replace(check, ok=False)]) == "A run could not work here."


def test_what_is_here_is_checked_and_nothing_else_said(model):
    shown = call("sweep", model, "layer=3", "--dry-run")
    assert shown.exit_code == 0 and "not checked" not in shown.stderr


def test_a_server_of_random_weights_needs_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    served = done("serve", "model=llama3_8b_shape", "--dry-run", "--json")
    assert "vllm" in document(served)["command"]
    assert "perplexity_tokens=0 workload.prompts=random" in refused(
        "bench", "model=llama3_8b_shape", "engine=cpu", "--dry-run"
    )
    loaded = call("load", "model=llama3_8b_shape", "engine=cpu", "workload.prompts=random", "--dry-run")
    assert loaded.exit_code == 0, loaded.stderr  # a load test scores no text


def test_the_doctor_notes_what_a_measurement_would_need_besides():
    shape = RunConfig(model=ModelConfig(load_format="dummy", max_model_len=100))
    preflight.check_files(shape)
    (check,) = doctor._workload(shape)
    assert check.ok is None and check.detail.startswith("to measure: workload.input_len=32")
    (check,) = doctor._workload(RunConfig(model=shape.model, workload=WorkloadConfig(input_len=2000)))
    assert check.ok is False and check.detail.startswith("workload.input_len=2000")


def test_a_setting_of_a_workload_is_said_to_have_no_effect_on_a_server(model):
    shown = done("serve", model, "workload.temperature=0.8", "repeats=3", "seed=1", "--dry-run")
    assert "workload.temperature=0.8 repeats=3: without effect on a server; each request says its own" in shown.stderr
    assert serve._without_effect(["layer=3", "seed=1", "engine.max_num_seqs=4", "results_dir=x"]) == []


def test_a_server_that_chooses_what_drafts_is_not_said_to_draft_with_its_first_layers(model):
    chosen, named = (call("serve", model, "engine=gpu", *more, "--dry-run") for more in ((), ("method=layer_skip",)))
    assert '{"method": "selfspec"}' in chosen.stdout and "layers draft" not in chosen.stderr
    assert "layers draft" in named.stderr


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ""),
        ([], ""),
        (True, "yes"),
        (["none", "varH"], "none, varH"),
        ((1, 2.0), "1, 2"),
        (["an arm", "the same, twice"], "an arm; the same, twice"),
        ({"k": 4, "drawn": False}, "k 4, drawn no"),
        ([["a", 1], ["b", None]], "a, 1; b"),
    ],
)
def test_a_value_of_a_plan_in_words(value, words):
    assert in_words(value) == words


def test_a_check_is_planned_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = done("check", str(CHECKS / "cpu_micro.yaml"), "--dry-run")
    assert "mean_accepted_len at least" in shown.stdout
    assert not any(word in shown.stdout for word in ("None", "True", "False", "{", "'"))


@pytest.mark.parametrize("command", ["tune", "verify", "roc", "fit-weights draft_weights=int4", "profile"])
def test_a_plan_for_people_holds_nothing_of_pythons(model, command):
    shown = done(*command.split(), model, "layer=3", "workload.prompts=random", "--dry-run")
    for word in ("[", "]", "None", "True", "False", "'", "dry_run"):
        assert word not in shown.stdout.replace(model, ""), (word, shown.stdout)
