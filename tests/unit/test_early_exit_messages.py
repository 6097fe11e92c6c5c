"""What is said of settings that cannot be honoured, word for word: a message that says less helps nobody."""

import math
from dataclasses import replace

import pytest

from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, check_threshold, device_features, number, require_device
from selfspec_cli.early_exit.gates.base import Rule
from selfspec_cli.early_exit.resolved import ResolvedSettings, warnings_for
from selfspec_cli.early_exit.settings import OPTIONS, USER_KEYS, DraftSettings, GateConfig

KEYS = ", ".join(USER_KEYS)
TAU = "adaedl, margin, maxp, survival"
LONG = (
    "because each draft token costs a step, a place in the verify pass and a slot of the KV cache, and a draft of "
    "that length is never accepted often enough to pay for itself"
)


def said(call, *arguments):
    """The text of the SettingsError."""
    with pytest.raises(SettingsError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            {"layer_skp": 3},
            f"speculative_config key 'layer_skp' is not known; allowed: {KEYS}; did you mean 'layer_skip'?",
        ),
        (
            {"method": "layerskip"},
            "method 'layerskip' is not known; allowed: layer_skip, skip; did you mean 'layer_skip'?",
        ),
        ({"head_path": 3}, "head_path = 3 must be text, a path or words"),
        ({"layer_skip": 12}, "layer_skip = 12 is out of range; allowed: 1 to 11 (the model has 12 layers)"),
        (
            {"layer_skip": True},
            "layer_skip = True must be an integer, not bool; allowed: 1 to 11 (the model has 12 layers)",
        ),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens = 2.0 must be an integer, not float"),
        ({"gate": "maxp", "tau": 1.5}, "tau = 1.5 is out of range for gate 'maxp'; allowed: from 0 to 1"),
        ({"gate": "maxp", "tau": "0.5"}, "tau = '0.5' must be a finite number"),
        (
            {"gate": "varH", "tau": 0.5},
            f"tau = 0.5 is not used by gate 'varH', which takes tau_v or threshold; gates that use tau: {TAU}",
        ),
        ({"tau": 0.5}, f"tau = 0.5 is given but gate 'none' has no threshold; gates that use tau: {TAU}"),
        (
            {"threshold": 0.5},
            "threshold = 0.5 is given but gate 'none' has no threshold; gates that use threshold: "
            "adaedl, entropy, margin, maxp, survival, varH",
        ),
        (
            {"gate": "maxp", "tau": 0.5, "tau_v": 1.0, "threshold": 0.5},
            "threshold = 0.5 and tau = 0.5 and tau_v = 1.0 mean the same setting; give one",
        ),
        (
            {"gate": 3},
            "gate 3 is not known; allowed: none, adaedl, auto, entropy, margin, maxp, survival, varH",
        ),
        (
            {"lsq_head_path": "a", "head_path": "b"},
            "head_path = 'b' and lsq_head_path = 'a' mean the same setting; give one",
        ),
        (
            {"method": "skip", "gate": "maxp"},
            "gate 'maxp' is not used by method 'skip', which drafts nothing; allowed: none",
        ),
        (
            {"method": "skip", "length_table": "3:2"},
            "length_table '3:2' is not used by method 'skip', which drafts nothing; allowed: none",
        ),
    ],
)
def test_of_a_users_words(spec, text):
    assert said(ResolvedSettings.from_user, spec, 12) == text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer": None}, "draft setting 'layer' is missing"),
        ({"k": None}, "draft setting 'k' is missing"),
        ({"k": 257}, f"k = 257 is out of range; allowed: from 1 to 256, {LONG}"),
        ({"lyer": 1}, f"draft setting 'lyer' is not known; allowed: {', '.join(OPTIONS)}; did you mean 'layer'?"),
        ({"acceptance_length": 0.5}, "acceptance_length = 0.5 is out of range; allowed: 1 or more"),
        ({"vocab": 0}, "vocab = 0: must be 'full', a number of tokens, 1 or more, or a file of token ids"),
        ({"draft_sample_method": "some"}, "draft_sample_method 'some' is not known; allowed: greedy, probabilistic"),
    ],
)
def test_of_settings_in_json(change, text):
    assert said(ResolvedSettings.from_dict, {**ResolvedSettings(layer=3, k=5).to_dict(), **change}) == text


@pytest.mark.parametrize(
    ("gate", "threshold", "text"),
    [
        (
            "maxp",
            0.0,
            "with tau = 0 never closes (the largest draft probability lies between 0 and 1): it is the same "
            "as gate 'none'",
        ),
        (
            "maxp",
            1.0,
            "with tau = 1 never opens but for ties by rounding (the largest draft probability lies between 0 "
            "and 1): drafts end after their first step",
        ),
        (
            "maxp",
            1.5,
            "with tau = 1.5 never opens (the largest draft probability lies between 0 and 1): every draft "
            "ends after its first step",
        ),
        (
            "entropy",
            -1.0,
            "with threshold = -1 never opens (the entropy in nats lies between 0 and 6.91): every draft "
            "ends after its first step",
        ),
    ],
)
def test_of_a_threshold_that_decides_nothing(gate, threshold, text):
    settings = DraftSettings(gate=GateConfig(gate), threshold=threshold)
    assert warnings_for(settings, 1000) == [f"gate {gate!r} {text}"]
    assert warnings_for(DraftSettings(), 1000) == []


def test_of_numbers_and_thresholds_on_a_live_engine():
    assert said(number, 10**400, "tau").startswith("tau = 1000")
    assert said(number, math.nan, "x") == "x = nan must be a finite number"
    assert said(number, True, "x") == "x = True must be a finite number"
    assert said(check_threshold, "none", 0.5, "tau_v") == (
        "tau_v = 0.5 is given but gate 'none' has no threshold; gates that use tau_v: varH"
    )
    assert said(check_threshold, "maxp", 2) == "threshold = 2 is out of range for gate 'maxp'; allowed: from 0 to 1"
    assert said(check_threshold, "maxp", "much") == "threshold = 'much' must be a finite number"
    assert said(check_threshold, None, 2).startswith("gate 'None' is not known; allowed: none, adaedl")
    assert (check_threshold("maxp", 0), check_threshold("maxp", 1), check_threshold("varH", None)) == (0.0, 1.0, 5.0)


def test_of_words():
    assert closest("b", ["a", "c"]) == "value 'b' is not known; allowed: a, c"
    assert closest("MAX", ["maxp", "varH"]) == "value 'MAX' is not known; allowed: maxp, varH; did you mean 'maxp'?"
    assert closest("x", ["maxp"], meant="varH") == "value 'x' is not known; allowed: maxp; did you mean 'varH'?"
    assert closest("abxx", ["abyy"]).endswith("did you mean 'abyy'?")  # half of the letters are the same
    assert "did you mean" not in closest("abxxx", ["abyyy"])


def test_of_gates():
    refused = "gate 'maxp': its device expression "
    assert said(lambda: replace(GATES["maxp"], device="b + a + tl.exp(1)")) == (
        f"{refused}'b + a + tl.exp(1)' uses a, b; allowed: confidence, second, entropy, varentropy, logit, logsumexp, "
        "previous, tl"
    )
    assert said(lambda: replace(GATES["maxp"], device="1 +")).startswith(f"{refused}'1 +' is no expression: ")
    assert said(lambda: replace(GATES["maxp"], device="x = 1")).startswith(f"{refused}'x = 1' is no expression: ")
    assert said(lambda: replace(GATES["maxp"], device="previous")) == (
        f"{refused[:-1]} uses previous, so it must be made cumulative=True"
    )
    assert said(lambda: replace(GATES["maxp"], key="taw")) == (
        "gate 'maxp': threshold key 'taw' is not known; allowed: threshold, tau, tau_v; did you mean 'tau'?"
    )
    assert said(require_device, Rule("mine", "at_least", 0.5)) == (
        f"gate 'mine' has no device expression, so it runs on the CPU only; allowed on CUDA: none, "
        f"{', '.join(device_features())}"
    )
    require_device(Rule("maxp", "at_least", 0.5))
    require_device(Rule(None, "at_least", 0.5))


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
    knob = knobs.Knob(help="", **about)
    assert knob.allowed() == text
    assert all(map(knob.admits, inside)) and not any(map(knob.admits, outside))
