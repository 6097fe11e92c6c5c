"""The last lines of `make test`: parts, skipped tests with their reasons, and a failure for those that need not be."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import summary

TESTS = """
import pytest

@pytest.mark.skipif(True, reason={reason!r})
@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number): pass

def test_more(): pass
"""
WHOLE = """
import pytest
pytest.importorskip("no_such_module", reason="pip install it")
def test_never(): pass
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs two small files with pytest as the Makefile does, and gives the folder of reports."""
    (tmp_path / "test_one.py").write_text(TESTS.format(reason=programs.reason(["axe-core"])))
    (tmp_path / "test_two.py").write_text(WHOLE)
    (tmp_path / "lint.seconds").write_text("7\n")
    (tmp_path / "begun").touch()
    os.utime(tmp_path / "begun", (1000, 1000))
    alone = ["-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *alone, f"--junitxml={tmp_path / 'unit.xml'}", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (tmp_path / "unit.seconds").write_text("12\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("installable", [True, False])
def test_a_run_in_which_a_program_was_missing(run, monkeypatch, capsys, installable):
    entry = replace(programs.PROGRAMS["axe-core"], manager=sys.executable if installable else "no-such-manager")
    monkeypatch.setitem(programs.PROGRAMS, "axe-core", entry)
    monkeypatch.setattr(summary.time, "time", lambda: 1015.0)  # some parts ran beside each other
    assert summary.main(str(run)) == int(installable)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [" ".join(line.split()) for line in lines[1:4]] == ["lint 7", "unit 12 4 3", "all 15 4 3"]
    reason = "not installed: axe-core; make programs installs them"
    assert lines[5] == f"skipped in unit: test_one.test_skipped[1] and 1 more: {reason}"
    assert lines[6] == "skipped in unit: test_two: pip install it"
    assert ("FAILED" in lines[-1]) == installable and ("axe-core" in lines[-1]) == installable


def test_reasons_name_their_programs_and_no_others():
    assert programs.named_in(programs.reason(["chromium", "axe-core"])) == ["chromium", "axe-core"]
    assert programs.named_in("vLLM is not installed: nothing to do") == []
    assert programs.needs("promtool").args == (bool(programs.missing("promtool")),)


def test_what_is_missing_is_installed_once_and_a_failure_is_one(monkeypatch, capsys):
    ran, here = [], set()
    packages = {"one": "both", "two": "both", "other": "alone", "nowhere": "x"}
    made = {
        name: programs.Program(lambda name=name: name in here, sys.executable, (package,))
        for name, package in packages.items()
    }
    made["nowhere"] = replace(made["nowhere"], manager="no-such-manager")
    monkeypatch.setattr(programs, "PROGRAMS", made)
    brings = {"both": {"one", "two"}, "alone": {"other"}}

    def install(command, check):
        ran.append(command[-1])
        here.update(brings[command[-1]])

    monkeypatch.setattr(programs.subprocess, "run", install)
    assert programs.main() == 0
    assert ran == ["both", "alone"]
    assert capsys.readouterr().err.startswith("nowhere is missing, and this machine cannot install it")
    here.clear()
    brings["alone"] = set()  # a manager that succeeds and installs nothing
    assert programs.main() == 1


def test_a_program_of_debians_is_installed_by_root_alone(monkeypatch):
    monkeypatch.setattr(programs.shutil, "which", lambda name: f"/usr/bin/{name}")
    for user, able in ((0, True), (1000, False)):
        monkeypatch.setattr(programs.os, "geteuid", lambda user=user: user)
        assert programs.PROGRAMS["chromium"].installable() is able
        assert programs.PROGRAMS["axe-core"].installable()


# ---- what tests/processes/sitecustomize.py keeps for all processes --------------------------------------------------


FILE = Path(__file__).parents[1] / "processes" / "sitecustomize.py"


def test_a_result_is_kept_for_the_same_call_and_path_alone(tmp_path, monkeypatch):
    calls = []

    def find(*args, **more):
        calls.append((args, more))
        return {"args": args, **more}

    found_once = runpy.run_path(str(FILE))["found_once"]
    one, other = found_once(find, tmp_path), found_once(find, tmp_path)
    assert one(1, prefix="a") == other(1, prefix="a") == {"args": (1,), "prefix": "a"}
    assert len(calls) == 1
    assert other(1, prefix="b") == {"args": (1,), "prefix": "b"}
    monkeypatch.syspath_prepend(tmp_path)
    one(1, prefix="a")
    assert len(calls) == 3


@pytest.mark.slow
def test_transformers_finds_the_classes_that_it_has(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.utils import import_utils

    own, kept = import_utils.define_import_structure.__wrapped__, import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models" / "llama"
    assert kept(folder) == kept(folder) == own(folder) != {}
    packages = sys.modules["importlib.metadata"].packages_distributions
    assert packages() == packages.__wrapped__()
