"""Objects by name: this package's modules first, then other packages' entry points, whose faults are named."""

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from selfspec_cli.early_exit import registry
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, Gate
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
    return Registry("gate", Gate, "selfspec_cli.early_exit.gates", "selfspec.gates", first="none")


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


def test_a_registry_is_a_mapping(gates):
    assert len(gates) == len(list(gates)) == 9
    assert "maxp" in gates and "distribution" not in gates and 3 not in gates
    assert [gate.name for gate in gates.values()] == list(gates)
    with pytest.raises(SettingsError, match=r"^gate 'maxq' is not known; allowed: none, .*; did you mean 'maxp'\?$"):
        gates["maxq"]


def test_another_default_comes_first_and_without_one_all_are_in_the_order_of_their_modules():
    ours = ("gate", Gate, "selfspec_cli.early_exit.gates", "no.such.group")
    names = ["adaedl", "auto", "entropy", "margin", "maxp", "none", "survival"]
    assert list(Registry(*ours, first="varH")) == ["varH", *names]
    assert list(Registry(*ours)) == sorted(Registry(*ours))
    assert Registry(*ours).broken == {}


def test_those_of_others_come_by_their_names_and_may_fail_without_a_word(monkeypatch):
    broken = Mock(dist=None, load=Mock(side_effect=AssertionError))
    broken.name = "broken"  # the name that Mock takes is its own
    theirs = SimpleNamespace(**{name: replace(GATES["maxp"], name=name) for name in ("zeta", "alpha", "twice")})
    monkeypatch.setitem(sys.modules, "more_gates", theirs)
    points = [EntryPoint(name, f"more_gates:{name}", "selfspec.gates") for name in ("zeta", "twice", "alpha", "twice")]
    monkeypatch.setattr(registry, "entry_points", lambda group: [*points, broken] if group == "selfspec.gates" else [])
    found = Registry("gate", Gate, "selfspec_cli.early_exit.gates", "selfspec.gates", first="none")
    assert list(found)[-4:] == ["varH", "alpha", "twice", "zeta"]
    assert found.broken == {
        "broken": "gate 'broken' of an installed package cannot be used: AssertionError: ",
        "twice": "gate 'twice' of an installed package cannot be used: that name is taken",
    }
