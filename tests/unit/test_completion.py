"""KEY=VALUE words complete: what is offered, and the word that bash, zsh and fish make of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import programs
import pytest

from selfspec_cli.commands.shared import complete
from selfspec_cli.config import choices, model_files, options
from selfspec_cli.config.schema import GROUPS, RunConfig
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.gates import GATES

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


def test_models_that_were_tuned_are_offered(tmp_path, monkeypatch):
    folder = tmp_path / "conf" / choices.TUNED
    folder.mkdir(parents=True)
    (folder / f"mine-{'0' * model_files.SHORT}.yaml").touch()
    monkeypatch.chdir(tmp_path)
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
    program = tmp_path / "bin" / "selfspec"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m selfspec_cli "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(tmp_path)}


BEGUN = {"gate=mar": "gate=margin", "free_dra": "free_drafts=", "engine=g": "engine=gpu"}
"""A choice, a key and a preset, and what TAB makes of them."""


def typed(shell, environment, begin, name):
    """What lines become when TAB is pressed behind them in an interactive shell; echo shows it."""
    child = pexpect.spawn(shell[0], shell[1:], env=environment, encoding="utf-8", timeout=60, dimensions=(24, 120))
    child.sendline(f'{begin}; eval "$(_SELFSPEC_COMPLETE=source_{name} selfspec)"; echo re""ady')
    child.expect_exact("ready")
    for begun, whole in BEGUN.items():
        child.send(f"selfspec sweep {begun}\t")
        child.expect("sweep " + "\x07?".join(map(re.escape, whole)))  # bash rings where more might follow
        child.send("\x03")  # Ctrl-C: the line is not run
    child.close(force=True)


@pytest.mark.slow
def test_bash_completes_a_word(environment):
    typed(["bash", "--norc", "--noprofile", "-i"], environment, "PS1='$ '", "bash")


@pytest.mark.slow
@programs.needs("zsh")
def test_zsh_completes_a_word(environment):
    typed(["zsh", "-f", "-i"], environment, "PS1='$ '; autoload -U compinit; compinit -u -D", "zsh")


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
