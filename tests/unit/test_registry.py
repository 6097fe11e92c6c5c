"""Objects by name: this package's modules first, then other packages' entry points, whose faults are told by name."""

import pytest

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import Gate
from selfspec_cli.early_exit.registry import Registry

MODULE = """
from dataclasses import replace
from selfspec_cli.early_exit.gates import GATES
NEW = replace(GATES["maxp"], name="new")
TAKEN = GATES["maxp"]
RENAMED = replace(GATES["maxp"], name="other")
WRONG = "a word"
"""
POINTS = """
[selfspec.gates]
new = their_gates:NEW
maxp = their_gates:TAKEN
renamed = their_gates:RENAMED
wrong = their_gates:WRONG
absent = their_gates:ABSENT
broken = no_such_package:GATE
"""


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """A registry as a new process reads it, with another package installed."""
    (tmp_path / "their_gates.py").write_text(MODULE)
    about = tmp_path / "their_gates-2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-gates\nVersion: 2.1\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Registry("gate", Gate, "selfspec_cli.early_exit.gates", "GATE", "selfspec.gates", first="none")


def test_the_default_comes_first_then_ours_then_theirs(gates):
    assert list(gates) == ["none", "adaedl", "calibrated", "entropy", "margin", "maxp", "survival", "varH", "new"]
    assert gates["new"].statistic is gates["maxp"].statistic


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("renamed", "called 'other'"),
        ("wrong", "is a str, and a Gate is needed"),
        ("absent", "ABSENT"),
        ("broken", "no_such_package"),
    ],
)
def test_what_cannot_be_loaded_is_left_out_and_asking_for_it_says_why(gates, name, reason):
    assert name not in gates
    with pytest.raises(SettingsError, match=rf"gate '{name}' of their-gates 2\.1 cannot be used: .*{reason}"):
        gates[name]
    assert name in gates.broken


def test_a_name_of_ours_cannot_be_taken(gates):
    assert gates["maxp"].default == 0.35
    assert gates.broken["maxp"] == "gate 'maxp' of their-gates 2.1 cannot be used: that name is taken"
