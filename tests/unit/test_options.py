"""The schema explains itself: every setting has help and a range, and documentation and help are made from it."""

import pytest
from commands import call, document

from selfspec_cli.config import options
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.settings import OPTIONS, DraftSettings

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


def test_draft_settings_are_defined_once():
    assert issubclass(RunConfig, DraftSettings)
    assert set(OPTIONS) <= set(ALL)
    for key in OPTIONS.keys() - {"method"}:  # a run may also be of a method that drafts with nothing of ours
        assert ALL[key] == OPTIONS[key]


def test_the_choices_are_the_registries():
    words = {key: ALL[key].knob.words() for key in ("gate.kind", "head.kind", "draft_weights")}
    assert words == {"gate.kind": tuple(GATES), "head.kind": tuple(HEADS), "draft_weights": tuple(DRAFT_WEIGHTS)}


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


def test_every_setting_of_drafting_reaches_an_engine():
    """One without a key in a speculative_config would name another arm, and change nothing."""
    assert OPTIONS and all(option.knob.spec_keys for option in OPTIONS.values())
