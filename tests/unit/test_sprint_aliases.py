"""The first sprint's words are answered with the line to type, on the command line and inside vLLM."""

import logging
import shlex
from types import SimpleNamespace

import pytest
from commands import call, done, refused

from selfspec_cli.early_exit import sprint_aliases
from selfspec_cli.vllm_plugin import detection, hooks

SPRINT = {"LAYERSKIP": "12", "EE_GATE": "varH", "EE_TAU_V": "5"}


@pytest.fixture(autouse=True)
def _no_old_variables(monkeypatch):
    for name in sprint_aliases.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    hooks._warn_of_old_variables.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--layerskip", "12"], "selfspec bench layer=12"),
        (["--layerskip=12", "--ee_gate", "varH,5"], "selfspec bench layer=12 gate=varH tau_v=5"),
        (
            ["k=4", "--ee_weight", "ee_head/ee_layer12_lsq.pt", "--layerskip", "12", "--json"],
            "selfspec bench k=4 --json layer=12 head.path=ee_head/ee_layer12_lsq.pt",
        ),
        (["EE_TAU=0.4"], "selfspec bench gate=maxp tau=0.4"),
        (["--layerskip", "0", "--ee_gate", "varH,5"], "selfspec bench method=baseline"),
        (["forward_partial=12"], "selfspec bench method=skip layer=12"),
        (["forward_partial"], "selfspec bench method=skip layer=E"),
    ],
)
def test_old_arguments_are_answered_with_the_line_to_type(arguments, line):
    found = call("bench", *arguments)
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1] == line
    old, _ = sprint_aliases.in_arguments(shlex.split(line)[2:])
    assert not old, "the answer holds no old word itself"


def test_what_is_handed_to_vllm_stays_behind_the_dashes():
    answer = sprint_aliases.answer_for_arguments("serve", ["k=4", "--layerskip", "12", "--", "--port", "1"])
    assert answer.splitlines()[-1] == "selfspec serve k=4 layer=12 -- --port 1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ee_gate", "varh,5"], "varH"),
        (["--layerskip", "twelve"], "twelve"),
        (["--ee_gate", "maxp,7"], "0 to 1"),
        (["--ee_gate", "varH,x"], "'x'"),
    ],
)
def test_an_old_word_with_a_bad_value_names_it(arguments, named):
    assert named in refused("bench", *arguments)


@pytest.mark.parametrize(
    "arguments", [["layer=12", "gate=varH"], ["--json"], ["model=layerskip_llama2_7b", "--layr=1"]]
)
def test_todays_words_are_left_alone(arguments):
    assert sprint_aliases.answer_for_arguments("bench", arguments) is None


def test_a_selfspec_command_warns_of_old_variables(monkeypatch):
    assert "nothing reads" not in call("options", "tau_v").stderr
    for name, value in SPRINT.items():
        monkeypatch.setenv(name, value)
    found = done("options", "tau_v")
    assert "LAYERSKIP=12 EE_GATE=varH EE_TAU_V=5" in found.stderr
    assert "type: selfspec options layer=12 gate=varH tau_v=5" in found.stderr


def _created(caplog, **given):
    """What vLLM's method was called with, and the log, for an engine's arguments."""
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens", "additional_config")
    args = SimpleNamespace(**dict.fromkeys(names) | given)
    seen = []
    create = hooks.early_exit_on_request(lambda self: seen.append(self.speculative_config))
    with caplog.at_level(logging.INFO, "vllm.selfspec"):
        create(args)
    assert args.speculative_config == given.get("speculative_config"), "what the user gave stays as it is"
    return seen, [record.message for record in caplog.records]


def test_vllm_with_old_variables_starts_and_says_once_what_to_type(monkeypatch, caplog):
    assert _created(caplog) == ([None], [])
    for name, value in SPRINT.items():
        monkeypatch.setenv(name, value)
    hooks._warn_of_old_variables.cache_clear()
    seen, messages = _created(caplog)
    assert seen == [None]
    assert len(messages) == 1
    assert messages[0].endswith("type: selfspec serve layer=12 gate=varH tau_v=5")
    assert _created(caplog)[1] == messages, "not logged again"


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"speculative_config": {"method": "layer_skp"}}, ["'layer_skip', given 'layer_skp'?"]),
        ({"spec_method": "LayerSkip"}, ["'layer_skip', given 'LayerSkip'?"]),
        ({"speculative_config": '{"method": "ngran"}'}, []),
        ({}, []),
    ],
)
def test_where_vllm_refuses_a_method_the_nearest_of_ours_is_named(given, notes):
    def refuse(self):
        raise ValueError("vLLM's own words")

    args = SimpleNamespace(**{"speculative_config": None, "spec_method": None, "additional_config": None} | given)
    with pytest.raises(ValueError, match="own words") as found:
        hooks.early_exit_on_request(refuse)(args)
    assert getattr(found.value, "__notes__", []) == [f"selfspec: did you mean the method {note}" for note in notes]


def test_a_bad_old_variable_never_breaks_vllm(monkeypatch, caplog):
    monkeypatch.setenv("EE_GATE", "nonsense")
    seen, messages = _created(caplog)
    assert seen == [None]
    assert "EE_GATE=nonsense" in messages[0]


@pytest.mark.parametrize("layer", [1, None, False, "00", 0.5])
def test_no_other_layer_is_off(layer):
    spec = {"method": "layer_skip", "layer_skip": layer}
    assert not detection.asks_for_no_layers(SimpleNamespace(speculative_config=spec))
    assert not detection.asks_for_no_layers(SimpleNamespace(speculative_config={"method": "ngram", "layer_skip": 0}))
