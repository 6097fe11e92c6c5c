"""What commands say to a user's words: the line to type, what would be done, what has no effect, how words go on."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pexpect
import programs
import pytest
from commands import call, document, done, model_folder, program, refused

from selfspec_cli.commands import serve
from selfspec_cli.commands.doctor import verdict
from selfspec_cli.commands.screen import in_words
from selfspec_cli.commands.shared import complete
from selfspec_cli.config import choices, model_files, options, paths
from selfspec_cli.config.schema import GROUPS, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.stages import doctor, preflight

CHECKS = paths.experiments_dir() / "checks"


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """Make a folder that looks like a model, and run the test in the folder that holds it."""
    monkeypatch.chdir(tmp_path)
    return f"model={model_folder(tmp_path / 'model', num_hidden_layers=8, max_position_embeddings=1024)}"


@pytest.mark.parametrize("command", ["sweep", "bench"])
def test_a_command_alone_shows_its_plan_and_what_to_type(command, monkeypatch):
    monkeypatch.setattr("selfspec_cli.engine.live.open_engine", lambda *_, **__: pytest.fail("an engine was started"))
    shown = call(command)
    assert shown.exit_code == 0 and shown.stdout.startswith("2 point(s) on 2 engine(s)")
    assert f"to measure it: selfspec {command} model=reference" in shown.stderr
    assert document(call(command, "--json"))["dry_run"] is True
    assert not Path("results").exists()
    assert "alone starts nothing" not in call(command, "model=reference", "--dry-run").stderr


def test_what_is_not_here_is_said_to_be_not_checked(monkeypatch):
    monkeypatch.setattr("selfspec_cli.stages.preflight.config_file", lambda model: None)
    shown = done("sweep", "model=org/name", "layer=99", "--dry-run")
    assert "are not checked: org/name is not here (hf download org/name)" in shown.stderr
    check = doctor._settings(RunConfig(model=ModelConfig(path="org/name")))
    assert check.ok is None and "not checked: org/name is not here" in check.detail
    assert verdict([check]) == "A run could work here; what depends on the model is not checked."
    assert verdict([replace(check, ok=True)]) == "A run could work here."
    assert verdict([check, replace(check, ok=False)]) == "A run could not work here."


def test_a_server_of_random_weights_needs_no_text():
    served = done("serve", "model=llama3_8b_shape", "--dry-run", "--json")
    assert "vllm" in document(served)["command"]
    measured = refused("bench", "model=llama3_8b_shape", "engine=cpu", "--dry-run")
    assert "perplexity_tokens=0 workload.prompts=random" in measured
    # A load test scores no text.
    done("load", "model=llama3_8b_shape", "engine=cpu", "workload.prompts=random", "--dry-run")


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


def test_a_check_is_planned_in_words():
    shown = done("check", str(CHECKS / "cpu_micro.yaml"), "--dry-run")
    assert "mean_accepted_len at least" in shown.stdout
    assert not any(word in shown.stdout for word in ("None", "True", "False", "{", "'"))


@pytest.mark.parametrize("command", ["tune", "verify", "roc", "fit-weights draft_weights=int4", "profile"])
def test_a_plan_for_people_holds_nothing_of_pythons(model, command):
    shown = done(*command.split(), model, "layer=3", "workload.prompts=random", "--dry-run")
    assert "not checked" not in shown.stderr  # the model is here
    for word in ("[", "]", "None", "True", "False", "'", "dry_run"):
        assert word not in shown.stdout.replace(model, ""), (word, shown.stdout)


# ---- completion ------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def offered(word):
    return [text for text, _ in options.candidates(word)]


def test_keys_are_offered_with_their_help():
    found = dict(options.candidates(""))
    every = {f"{key}=" for key in knobs.options(RunConfig).keys() - options.RARE}
    assert found.keys() == every | {f"{name}=" for name in (*GROUPS, "experiment", "tuned")}
    assert all(found.values())
    assert offered("tau") == ["tau=", "tau_v="]  # rare ones where nothing else begins so


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("gate=", [f"gate={name}" for name in GATES]),
        ("gate=varH,ma", ["gate=varH,margin", "gate=varH,maxp"]),
        ("gate=margin,mar", []),
        ("engine=", ["engine=cpu", "engine=gpu"]),
        ("engine.enforce_eager=t", ["engine.enforce_eager=true"]),
        ("draft_weights=int", ["draft_weights=int4", "draft_weights=int8"]),
        ("experiment=m0_s", ["experiment=m0_sanity"]),
        ("layer=", []),
        ("nothing=", []),
    ],
)
def test_choices_and_presets_are_offered(word, expected):
    assert sorted(offered(word)) == sorted(expected)


def test_models_that_were_tuned_are_offered():
    folder = Path("conf", choices.TUNED)
    folder.mkdir(parents=True)
    (folder / f"mine-{'0' * model_files.SHORT}.yaml").touch()
    assert offered("tuned=") == ["tuned=mine"]


@pytest.mark.parametrize(
    ("line", "at", "incomplete", "expected"),
    [
        ("selfspec sweep gate = ma", 4, "ma", ["margin", "maxp"]),
        ("selfspec sweep tracker.kind =", 3, "", ["none", "wandb"]),
        ("selfspec sweep ga", 2, "ga", ["gate=", "gate.kind="]),
        ("selfspec sweep workload.prompts='a b' laye", 3, "laye", ["layer=", "layer=VALUE"]),
    ],
)
def test_bash_takes_what_stands_before_the_equals_sign_for_a_word(monkeypatch, line, at, incomplete, expected):
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(at))
    assert [text for text, _ in complete(incomplete)] == expected


@pytest.fixture
def environment(tmp_path):
    """Of a shell that finds this checkout's `selfspec`."""
    paths = {"PATH": f"{program(tmp_path).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    return os.environ | paths | {"TERM": "dumb"}


BEGUN = {"gate=mar": "gate=margin", "free_dra": "free_drafts=", "engine=g": "engine=gpu"}
"""A choice, a key and a preset, and what TAB makes of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "begin"),
    [
        ("bash --norc --noprofile -i", "PS1='$ '"),
        pytest.param("zsh -f -i", "PS1='$ '; autoload -U compinit; compinit -u -D", marks=programs.needs("zsh")),
    ],
)
def test_tab_completes_a_word_in_an_interactive_shell(environment, shell, begin):
    """echo shows what lines become."""
    child = pexpect.spawn(shell, env=environment, encoding="utf-8", timeout=60, dimensions=(24, 120))
    child.sendline(f'{begin}; eval "$(_SELFSPEC_COMPLETE=source_{shell.split()[0]} selfspec)"; echo re""ady')
    child.expect_exact("ready")
    for begun, whole in BEGUN.items():
        child.send(f"selfspec sweep {begun}\t")
        child.expect("sweep " + "\x07?".join(map(re.escape, whole)))  # bash rings where more might follow
        child.send("\x03")  # Ctrl-C: the line is not run
    child.close(force=True)


@pytest.mark.slow
@programs.needs("fish")
def test_fish_completes_a_word(environment):
    asked = "; complete --do-complete ".join(
        ["_SELFSPEC_COMPLETE=source_fish selfspec | source", *(f"'selfspec sweep {begun}'" for begun in BEGUN)]
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [*BEGUN.values()]
