"""`selfspec ppl` and `selfspec eval` as commands: what they hand on, show and refuse."""

import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
from commands import call, document, model_folder

from selfspec_cli import extras
from selfspec_cli.record import folder, quality
from selfspec_cli.record.quality import Finding
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.stages import ppl as stage
from selfspec_cli.stages.arms import Failure, Found


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A folder that looks like a model of eight layers; the test runs beside it."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=1024)
    return f"model={folder}"


def finding(kind, found, **arm):
    named = {"arm": "skip", "E": 4, "head": "lens"} | arm
    return Finding(kind, "a" * 12, "r", "t", "d", named, "b" * 12, {"corpus": "stdlib"}, found)


SCORES = {"nats": [2.0, 4.0], "tokens": [2, 2]}
BASE = {"nats": [2.0, 2.0], "tokens": [2, 2]}
GENERATED = {"scores": SCORES, "baseline": BASE, "identical": 1, "outputs": 2, "drafted": 8, "accepted": 6}
FOUND = [
    finding(quality.TEXT, {"documents": ["a", "b"], "scores": SCORES, "baseline": BASE}),
    finding(quality.GENERATED, {"greedy": GENERATED, "sampled": GENERATED}),
]


@pytest.fixture
def asked(monkeypatch):
    """What reaches the stage, which finds FOUND."""
    words = {}

    def run(cfgs, request, *, open_engine, progress):
        words.update(cfgs=cfgs, request=request)
        print("noise from a library")
        return Found(list(FOUND), words.get("failed", []), words.get("warnings", []))

    monkeypatch.setattr(stage, "run", run)
    return words


def test_ppl_hands_on_its_words_and_shows_both_perplexities_apart(asked, model):
    result = call("ppl", "method=skip", "layer=2,4", model, "--window", "64", "--stride", "16", "--prompts", "5")
    assert result.exit_code == 0, result.output
    request = asked["request"]
    assert (request.window, request.stride, request.prompts, request.temperature) == (64, 16, 5, 1.0)
    assert [cfg.layer for cfg in asked["cfgs"]] == [2, 4]
    (line,) = [line for line in result.stdout.splitlines() if "skip E=4" in line]
    assert line.count("4.482 (") == 3 and line.count("+1.763 (") == 3  # exp(6/4), and less exp(1)
    assert "1/2" in line and "75%" in line
    assert "under the plain model" in result.stdout
    assert "noise" not in result.stdout


def test_ppl_ends_with_a_document(asked, model):
    asked["failed"] = [Failure("skip E=4", "out of memory", False)]
    asked["warnings"] = ["no draft was accepted"]
    result = call("ppl", "method=skip", model, "--json")
    assert result.exit_code == 1
    shown = document(result)
    assert shown["findings"][0]["delta_ppl"] == pytest.approx(1.763, abs=1e-3)
    assert shown["findings"][1]["delta_ppl_of_greedy"] == pytest.approx(1.763, abs=1e-3)
    assert shown["failed"] == [{"arm": "skip E=4", "reason": "out of memory", "bad_input": False}]
    assert "no draft was accepted" in result.stderr


def test_ppl_sends_its_findings_to_the_tracker_that_is_asked_for(asked, model, monkeypatch):
    """With tracker=wandb it logged nothing."""
    sent = []

    class Reports(Tracker):
        def report(self, command, results, rows, pictures):
            sent.append((command, [(row.arm, round(row.delta_ppl_of_greedy, 3)) for row in rows]))

    monkeypatch.setattr("selfspec_cli.commands.measuring.open_tracker", lambda cfg, run_id: nullcontext(Reports()))
    for found in FOUND:
        folder.save_finding("results", replace(found, arm=found.arm | {"model": "m"}))
    assert call("ppl", "method=skip", model).exit_code == 0 and sent == []
    result = call("ppl", "method=skip", model, "tracker=wandb")
    assert result.exit_code == 0, result.output
    assert sent == [("ppl", [("skip", 1.763)])]


@pytest.mark.parametrize("command", ["ppl", "eval"])
def test_a_dry_run_names_the_arms_and_starts_nothing(asked, model, command):
    words = ("gate=varH", "tau_v=4,5", "workload.batch=1,4", model, "--dry-run", "--json")
    shown = document(call(command, *words))
    arm = "layer_skip E=4 k=5 head=lens gate=varH threshold="
    assert shown["arms"] == ["baseline", f"{arm}4.0", f"{arm}5.0"]
    assert asked == {}
    assert "baseline" in call(command, *words[:-1]).stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ppl", "--stride", "512"), "--stride 512: it must be from 1 to the window less 1, 511"),
        (("ppl", "--corpus", "gone.txt"), "there is no such file; allowed: stdlib"),
        (("eval", "--limit", "0"), "--limit"),
    ],
)
def test_bad_input_is_a_short_message_and_exit_code_2(words, expected, model):
    result = call(*words, model)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert "Traceback" not in result.output


def test_without_the_harness_eval_says_what_to_install(monkeypatch, model):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("selfspec_cli.stages.evaluate", "selfspec_cli.engine.harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("selfspec_cli.stages.evaluate", raising=False)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "lm_eval":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    result = call("eval", model)
    assert result.exit_code == 2
    assert extras.install("eval") in result.stderr
