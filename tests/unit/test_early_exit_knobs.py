"""Settings of any schema: its options in order, their ranges and words, and reading and writing them by their keys."""

import math
from dataclasses import dataclass, field

import pytest

from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.knobs import Knob, knob


class Words(dict):
    """Choices of which one could not be loaded, as a registry has them."""

    broken = {"lost": "word 'lost' cannot be used: it is lost"}  # noqa: RUF012


@dataclass
class Inner:
    """Some of the settings."""

    word: str = knob("ann", help="a word", choices=Words(ann=1, bob=2))
    size: int = knob(9, help="a size", low=1, high=4, unit="tokens")  # a default that is out of its own range


@dataclass
class Outer:
    """All of the settings."""

    number: int | None = knob(None, help="a number", low=2, spec_keys=("number",))
    inner: Inner = field(default_factory=Inner)
    names: list[str] = knob(factory=lambda: ["x"], help="names")
    free: float = knob(0.5, help="checked elsewhere", limits="those of the gate", low=1)
    level: int = knob(1, help="one of some numbers", choices=(1, 2))
    flag: bool = knob(False, help="on or off")


KEYS = ["number", "inner.word", "inner.size", "names", "free", "level", "flag"]


def test_the_options_of_a_schema_are_its_fields_and_those_of_the_dataclasses_in_it():
    found = knobs.options(Outer)
    assert list(found) == [option.key for option in found.values()] == KEYS
    assert [option.type for option in found.values()] == [int | None, str, int, list[str], float, int, bool]
    assert [option.default for option in found.values()] == [None, "ann", 9, ["x"], 0.5, 1, False]
    assert [option.is_number for option in found.values()] == [True, False, True, False, True, True, False]
    assert found["inner.size"].knob == Knob(help="a size", low=1, high=4, unit="tokens")
    assert Outer().names == ["x"] and Outer().names is not Outer().names
    assert Outer().inner == Inner("ann", 9)


def test_the_words_of_a_setting_and_what_is_said_of_others():
    about = knobs.options(Outer)["inner.word"].knob
    assert about.words() == ("ann", "bob")
    assert about.wrong_word("anne", "name") == "name 'anne' is not known; allowed: ann, bob; did you mean 'ann'?"
    assert about.wrong_word("lost", "name") == "word 'lost' cannot be used: it is lost"
    assert Knob("", choices=("a",)).wrong_word("zz", "name") == "name 'zz' is not known; allowed: a"
    assert Knob("", choices=(1, 2)).words() == ("1", "2")


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("number", [None, 2, 3, 10**400], [1, 0, -5]),
        ("inner.word", ["ann", "bob", None], ["lost", ""]),
        ("inner.size", [1, 4, 9, None], [0, 5]),  # its default, 9, is always admitted
        ("names", [["x"], ["y", "z"], None], []),
        ("free", [0.0, 0.5, -3.0], []),  # other code checks it
        ("level", [1, 2], [3, 0]),
        ("flag", [True, False], []),
    ],
)
def test_what_an_option_admits(key, inside, outside):
    option = knobs.options(Outer)[key]
    assert [knobs.admits(option, value) for value in inside] == [True] * len(inside)
    assert [knobs.admits(option, value) for value in outside] == [False] * len(outside)
    for value in [*inside, *outside]:
        config = Outer()
        knobs.write(config, key, value)
        found = [(one.key, got) for one, got in knobs.out_of_range(config)]
        assert found == ([(key, value)] if value in outside else [])


def test_every_value_out_of_its_range_is_told_in_the_order_of_the_fields():
    config = Outer(number=1, inner=Inner("eve", 0), level=2, names=[])
    assert [(option.key, value) for option, value in knobs.out_of_range(config)] == [
        ("number", 1),
        ("inner.word", "eve"),
        ("inner.size", 0),
    ]
    assert list(knobs.out_of_range(Outer())) == []


@pytest.mark.parametrize(
    ("about", "text", "inside", "outside"),
    [
        ({}, "", [-1e9, 0, 10**400], [math.inf, math.nan]),
        ({"low": 1}, "1 or more", [1, 2], [0.99]),
        ({"low": 1, "high": 2}, "from 1 to 2", [1, 1.5, 2], [0.99, 2.01]),
        ({"above": 0}, "more than 0", [0.1], [0, -1]),
        ({"above": 0, "high": 1}, "more than 0, up to 1", [0.1, 1], [0, 1.1]),
        ({"high": 3}, "", [3, -5], [4, 10**400]),
        ({"limits": "those of the gate", "low": 1}, "those of the gate", [1], [0]),
    ],
)
def test_of_the_range_of_a_setting(about, text, inside, outside):
    setting = Knob(help="", **about)
    assert setting.allowed() == text
    assert all(map(setting.admits, inside)) and not any(map(setting.admits, outside))
