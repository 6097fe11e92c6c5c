"""Settings of any schema by their keys, and those of a run: each has help and a range."""

import math
from dataclasses import dataclass, field

import pytest
from commands import call, document

from selfspec_cli.config import options
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.knobs import Knob, knob
from selfspec_cli.early_exit.settings import OPTIONS, DraftSettings


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


# ---- the settings of a run -------------------------------------------------------------------------------------------


ALL = knobs.options(RunConfig)


@pytest.mark.parametrize("key", ALL)
def test_every_setting_has_help_every_number_a_range_and_every_null_a_meaning(key):
    option = ALL[key]
    assert option.knob.help
    assert knobs.admits(option, option.default)
    if option.is_number:
        assert option.knob.allowed(), "a range, or `limits` in words"
    if option.default is None:
        assert option.knob.unset


def test_draft_settings_are_defined_once_and_reach_an_engine():
    """One without a key in a speculative_config would name another arm, and change nothing."""
    assert all(option.knob.spec_keys for option in OPTIONS.values())
    assert issubclass(RunConfig, DraftSettings)
    assert set(OPTIONS) <= set(ALL)
    for key in OPTIONS.keys() - {"method"}:  # a run may also be of a method that drafts with nothing of ours
        assert ALL[key] == OPTIONS[key]


def test_options_shows_what_has_to_do_with_a_word():
    assert {row["key"] for row in document(call("options", "--json"))["options"]} == set(ALL)
    found = document(call("options", "varentropy", "--json"))
    assert found["options"] == []
    assert [one["name"] for one in found["choices"]] == ["varH"]
    (k,) = [row for row in document(call("options", "draft length", "--json"))["options"] if row["key"] == "k"]
    assert (k["unit"], k["allowed"], k["spec_key"]) == ("tokens", "from 1 to 256", "num_speculative_tokens")
    wrong = call("options", "acceptence_length")
    assert wrong.exit_code == 2 and wrong.stdout == "" and "'acceptence_length'" in wrong.stderr
    assert "did you mean 'acceptance_length'?" in wrong.stderr
    wrong = call("options", "qqqqqq", "--json")
    assert wrong.exit_code == 2 and document(wrong)["exit_code"] == 2 and "did you mean" not in wrong.stderr
    assert "tau_v" in call("options", "tau").stdout


@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_the_help_of_a_command_lists_the_draft_settings(command):
    shown = call(command, "--help").stdout
    for key in OPTIONS.keys() - options.RARE:
        assert key in shown
    assert "acceptance_length" not in shown


def test_settings_that_no_user_needs_are_shown_for_their_word_or_with_all():
    assert ALL.keys() >= options.RARE
    usual = call("options").stdout
    lines = [line.split(" = ")[0] for line in usual.splitlines()]
    assert not options.RARE.intersection(lines) and "threshold" in lines
    assert f"{len(options.RARE)} more are rarely needed: selfspec options --all" in usual
    every = [line.split(" = ")[0] for line in call("options", "--all").stdout.splitlines()]
    assert options.RARE < set(every)
    assert "runner = auto" in call("options", "runner").stdout
    assert len(ALL) <= 70
