"""The first lines that a reader types: each of README.md and docs/index.md is run here as far as that goes without an
engine, and read by the parser that it is meant for otherwise.

tests/contract/test_spec_config.py asks vLLM's own parsers, tests/engine/test_screen.py measures, and
tests/engine/test_server.py serves.
"""

import re
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import points
import pytest
from commands import call, model_folder
from first_lines import COMMANDS, INDEX, README, ROOT, lines, of_kind, overrides, python_blocks

from selfspec_cli.commands.app import app
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.early_exit.defaults import VIEW_KEYS
from selfspec_cli.record import folder

NEEDS_POINTS = ("report", "runs")
MODELS = ("ORG/MODEL", "meta-llama/Meta-Llama-3-8B")
"""Names in the pages; here they are folders, as after `hf download`."""


def test_every_line_is_of_a_kind_that_a_test_looks_at():
    strange = [line for line in lines(README, INDEX) if not any(re.match(kind, line) for kind in COMMANDS.values())]
    assert strange == []
    assert all(of_kind(kind, README, INDEX) for kind in COMMANDS)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with points and a model, in which a reader works."""
    monkeypatch.chdir(tmp_path)
    base = points.baseline()
    for point in (base, points.against(base)):
        folder.save("results", point)
    shape = {"num_hidden_layers": 32, "hidden_size": 64, "vocab_size": 64, "max_position_embeddings": 8192}
    for name in MODELS:
        (tmp_path / name).parent.mkdir()
        model_folder(tmp_path / name, architectures=["LlamaForCausalLM"], **shape)


@pytest.mark.parametrize("words", of_kind("selfspec", README, INDEX), ids=" ".join)
def test_selfspecs_own_commands(words, elsewhere, monkeypatch):
    """Without an engine: what would start one is planned."""
    monkeypatch.setattr("selfspec_cli.engine.live.open_engine", lambda *_, **__: pytest.fail("an engine was started"))
    name, *rest = words[1:]
    if name == "doctor":  # asks this machine
        assert compose_runs(None, overrides(rest))
        return
    shown = call(name, *rest, *([] if name in NEEDS_POINTS else ["--dry-run"]))
    assert shown.exit_code == 0, shown.output


def test_commands_that_sentences_name_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = {name for page in (README, INDEX) for name in re.findall(r"`selfspec ([\w-]+)", page.read_text("utf-8"))}
    assert len(named) > 10 and named <= known


@pytest.mark.parametrize("words", of_kind("make", README, INDEX), ids=" ".join)
def test_targets_of_make(words):
    made = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout, made.stderr


@pytest.mark.parametrize("words", of_kind("pip", README, INDEX), ids=" ".join)
def test_what_pip_is_to_install(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = words[2:]
    for option, file in pairwise(names):
        if option == "-c":
            assert (ROOT / file).is_file()
    for name in names:
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", name)
        if found:
            assert set((found[1] or "cuda").split(",")) <= extras.keys()
        elif name.startswith("./"):
            assert list(ROOT.glob(name))
        else:
            assert name in ("-c", "constraints-cpu.txt")


def test_no_first_line_starts_what_loses_for_an_ordinary_model():
    """Drafts of the first layers, or a gate by varentropy, in the lines of which most are copied."""
    pages = [README, INDEX, *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for words in of_kind("vllm", page):
            assert not re.search(r'"layer_skip": *\d', " ".join(words)), (page.name, words)
        for words in of_kind("selfspec", page):
            model = next((word for word in words if word.startswith("model=")), "")
            layers = any(re.match(r"layer=\d", word) for word in words)
            ordinary = "llama3_8b" in model or "Llama-3" in model or "ORG/" in model
            assert not (layers and ordinary), (page.name, words)
            if "gate=varH" in words:
                assert words == ["selfspec", "sweep", "gate=varH", "tau_v=4,5,6"], (page.name, words)
    for block in python_blocks(README, INDEX):
        assert not set(VIEW_KEYS).intersection(re.findall(r'"(\w+)":', block))


def test_python_blocks_are_python():
    blocks = python_blocks(README, INDEX)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "docs/index.md", "exec")


def test_the_readme_fits_one_screen():
    text = Path(README).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    table = text.partition("<!-- one_line -->")[2].partition("<!-- /one_line -->")[0]
    assert 4 <= sum(line.startswith("|") for line in table.splitlines()) <= 10
