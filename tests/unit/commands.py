"""Running `selfspec` commands in this process, with stand-ins for what imports vLLM."""

import json
import sys
import time
from importlib import import_module
from types import ModuleType

import pytest
from typer.testing import CliRunner

from selfspec_cli.commands.app import app
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError


class Clock:
    """Stands still until something takes its time."""

    now = 0.0

    def __call__(self):
        return self.now


def call(*words):
    return CliRunner().invoke(app, words)


def done(*words):
    """The result of a command that ends well."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    """What a command says in stderr that ends with exit code 2, in one line."""
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and len(result.stderr.splitlines()) < 15
    return " ".join(result.stderr.split())


def until(holds, seconds=120):
    """Wait until `holds()` says yes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it is not so in time"
        time.sleep(0.02)


def one(*words):
    """The one config that words say."""
    (cfg,) = compose_runs(None, words)
    return cfg


def refusal(*words, **options):
    """What is said of words that make no config."""
    with pytest.raises(ConfigError) as caught:
        compose_runs(None, words, **options)
    return str(caught.value)


def document(result):
    return json.loads(result.stdout.splitlines()[-1])


def stand_in(monkeypatch, name, *functions):
    """Put a module in the place of one that imports vLLM."""
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, leaf = name.rpartition(".")
    monkeypatch.setattr(import_module(package), leaf, module, raising=False)


def model_folder(folder, **config):
    """A folder that looks like a model: what its config.json says, and the names of its other files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def jsonl(path, rows):
    """The path of a file with a row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def program(folder):
    """A program called selfspec, in a folder of its own: this Python's."""
    file = folder / "bin" / "selfspec"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m selfspec_cli "$@"\n')
    file.chmod(0o755)
    return file
