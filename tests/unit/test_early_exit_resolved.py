"""What an engine makes of draft settings: what is filled in, what comes back, and what does not go together."""

import math
import subprocess
import sys
from functools import partial

import pytest
import refusals

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, check_threshold, number
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import ResolvedSettings, checked_table, warnings_for
from selfspec_cli.early_exit.settings import USER_KEYS, DraftSettings, GateConfig, to_spec, vllm_keys
from selfspec_cli.early_exit.view import DraftView

PER_BATCH = "num_speculative_tokens_per_batch_size"
VLLMS = ("draft_sample_method", "synthetic_acceptance_length", PER_BATCH)

KEYS = ", ".join(USER_KEYS)
TAU = "adaedl, margin, maxp, survival"
LONG = (
    "because each draft token costs a step, a place in the verify pass and a slot of the KV cache, and a draft of "
    "that length is never accepted often enough to pay for itself"
)
RANGE = "(the largest draft probability lies between 0 and 1)"
NATS = "(the entropy in nats lies between 0 and 6.91)"


def read(layers=24, **spec):
    return ResolvedSettings.from_user(spec, layers, passthrough=VLLMS)


said = partial(refusals.said, SettingsError)


# ---- what is filled in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "weights", "skip", "default", "deepest"),
    [
        (2, "shared", None, 1, 1),
        (12, "shared", "", 6, 11),
        (13, "shared", None, 6, 12),
        (12, "shared", "3", 12, 12),
        (12, "int4", None, 12, 12),
        (12, "fp8", "3", 12, 12),
    ],
)
def test_a_cheaper_view_goes_through_all_layers_and_another_through_half_of_them(
    layers, weights, skip, default, deepest
):
    view = {"draft_weights": weights, "skip_layers": skip}
    drafts = DraftView.of(DraftSettings(**view))
    assert drafts.default_layer(layers) == read(layers, **view).layer == default
    assert drafts.deepest_layer(layers) == read(layers, layer_skip=deepest, **view).layer == deepest
    assert f"allowed: 1 to {deepest} (" in said(read, layers=layers, layer_skip=deepest + 1, **view)
    assert drafts.is_cheaper == (default == layers)


def test_the_layers_that_draft_and_whether_drafts_are_verified():
    settings = read(layer_skip=6, skip_layers=[3, 0, 2])
    assert (settings.skip_layers, settings.skipped, settings.drafting_layers) == ("0,2-3", (0, 2, 3), (1, 4, 5))
    assert read(skip_layers="7").drafting_layers == (*range(7), *range(8, 24))
    assert (read().skipped, read().drafting_layers) == ((), tuple(range(12)))
    assert read().verify is True
    assert read(method="skip").verify is False


def test_a_draft_step_is_assumed_to_cost_its_share_of_layers_and_of_bits_and_the_widest_draft_has_places():
    assert read(layer_skip=6, skip_layers="0,2-3").assumed_draft_step(24) == (3 + 1) / 24
    assert read(layer_skip=5, draft_weights="int4").assumed_draft_step(24) == pytest.approx(
        6 / 24 * 4.125 / 16, rel=0.1
    )
    free = read(layer_skip=5, num_speculative_tokens=4, free_drafts=12)
    assert (free.width, read(num_speculative_tokens=4, free_drafts=2).width) == (12, 4)
    assert ResolvedSettings.from_dict(free.to_dict()) == free


def test_measured_times_choose_under_gate_auto_and_say_when_free_drafts_end_a_round():
    choosing = {"none": (False, False), "maxp": (False, False), "auto": (True, True)}
    for gate, expected in choosing.items():
        settings = read(gate=gate)
        assert (settings.chooses_width, settings.measures) == expected
        assert ResolvedSettings.from_dict(settings.to_dict()) == settings
    free = read(free_drafts=4)
    assert (free.chooses_width, free.measures) == (False, True)
    assert said(read, gate="auto", threshold=0.5).startswith(
        "threshold = 0.5 is given but gate 'auto' has no threshold"
    )


def test_the_plain_name_of_the_method_is_that_of_the_sprint():
    assert read(method="selfspec", layer_skip=3) == read(method="layer_skip", layer_skip=3)


def test_a_table_of_lengths_is_kept_in_its_own_spelling():
    assert read().table == LengthTable.fixed(5)
    assert read(num_speculative_tokens=3).table == LengthTable.fixed(3)
    assert read(length_table="9:0 3:2").length_table == "1:5 3:2 9:0"
    assert read(length_table="9:0 3:2").table == LengthTable.parse("3:2 9:0", 5)
    assert read(**{PER_BATCH: [[1, 2, 9], [3, 4, 2]]}).length_table == "1:5 3:2"
    assert checked_table(None, 5) is None


# ---- what is written back --------------------------------------------------------------------------------------------


def test_every_key_that_a_speculative_config_gets():
    settings = read(layer_skip=3, gate="maxp", tau=0.25, head_path="a", draft_weights="int4", draft_window=64)
    assert to_spec(settings) == {
        "method": "layer_skip",
        "layer_skip": 3,
        "num_speculative_tokens": 5,
        "gate": "maxp",
        "threshold": 0.25,
        "head_path": "a",
        "draft_weights": "int4",
        "draft_weights_path": None,
        "skip_layers": None,
        "draft_context": "window:64",
        "length_table": None,
        "free_drafts": 0,
        "strict": False,
    }
    skip = {"method": "skip", "layer_skip": 3, "head_path": "a"}
    assert to_spec(read(**skip)) == skip
    assert to_spec(DraftSettings(gate=GateConfig("varH"), threshold=3.0))["threshold"] == 3.0


def test_the_keys_that_are_vllms_own_are_read_and_written_back():
    assert vllm_keys(DraftSettings()) == vllm_keys(read()) == vllm_keys(read(draft_sample_method="greedy")) == {}
    drawn = {"draft_sample_method": "probabilistic"}
    settings = read(**drawn)
    assert vllm_keys(settings) == drawn
    assert ResolvedSettings.from_dict(settings.to_dict()) == read(**to_spec(settings)) == settings
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert vllm_keys(DraftSettings(acceptance_length=2.5)) == synthetic
    assert read(synthetic_acceptance_length=2).acceptance_length == 2.0
    both = DraftSettings(**drawn, acceptance_length=2.5)
    assert vllm_keys(both) == drawn | synthetic
    assert vllm_keys(both).items() <= to_spec(both).items()


# ---- what does not go together ---------------------------------------------------------------------------------------


WRONG = {
    f"speculative_config key 'layer_skp' is not known; allowed: {KEYS}; did you mean 'layer_skip'?": {"layer_skp": 3},
    "method 'layerskip' is not known; allowed: layer_skip, skip; did you mean 'layer_skip'?": {"method": "layerskip"},
    "head_path = 3 must be text, a path or words": {"head_path": 3},
    "layer_skip = 12 is out of range; allowed: 1 to 11 (the model has 12 layers)": {"layers": 12, "layer_skip": 12},
    "layer_skip = True must be an integer, not bool; allowed: 1 to 23 (the model has 24 layers)": {"layer_skip": True},
    "num_speculative_tokens = 2.0 must be an integer, not float": {"num_speculative_tokens": 2.0},
    f"num_speculative_tokens = 257 is out of range; allowed: from 1 to 256, {LONG}": {"num_speculative_tokens": 257},
    "tau = 1.5 is out of range for gate 'maxp'; allowed: from 0 to 1": {"gate": "maxp", "tau": 1.5},
    "tau = '0.5' must be a finite number": {"gate": "maxp", "tau": "0.5"},
    f"tau = 0.5 is not used by gate 'varH', which takes tau_v or threshold; gates that use tau: {TAU}": {
        "gate": "varH",
        "tau": 0.5,
    },
    f"tau = 0.5 is given but gate 'none' has no threshold; gates that use tau: {TAU}": {"tau": 0.5},
    "threshold = 0.5 is given but gate 'none' has no threshold; gates that use threshold: "
    "adaedl, entropy, margin, maxp, survival, varH": {"threshold": 0.5},
    "threshold = 0.5 and tau = 0.5 and tau_v = 1.0 mean the same setting; give one": {
        "gate": "maxp",
        "tau": 0.5,
        "tau_v": 1.0,
        "threshold": 0.5,
    },
    "gate 3 is not known; allowed: none, adaedl, auto, entropy, margin, maxp, survival, varH": {"gate": 3},
    "head_path = 'b' and lsq_head_path = 'a' mean the same setting; give one": {"lsq_head_path": "a", "head_path": "b"},
    "gate 'maxp' is not used by method 'skip', which drafts nothing; allowed: none": {"method": "skip", "gate": "maxp"},
    "length_table '3:2' is not used by method 'skip', which drafts nothing; allowed: none": {
        "method": "skip",
        "length_table": "3:2",
    },
    "draft_weights_path = 'w' holds copies, and draft_weights is 'shared'; name the kind of copies that it holds": {
        "draft_weights_path": "w"
    },
    f"length_table and {PER_BATCH} mean the same setting; give one": {"length_table": "3:2", PER_BATCH: [[1, 8, 2]]},
    "skip_layers = 7: layer 7 does not draft; allowed: 0 to 6, for layers 0 to 6 draft": {
        "skip_layers": "7",
        "layer_skip": 7,
    },
    "skip_layers = 0-2 leaves none of 3 layers to draft with; skip fewer": {"skip_layers": "0-2", "layer_skip": 3},
    "draft_window = 15 is out of range; allowed: 16 or more": {"draft_window": 15},
    "draft_window = 'many' must be an integer, not str": {"draft_window": "many"},
    "draft_context = 64 must be text, such as window:1024": {"draft_context": 64},
    "draft_context = 'window:64' and draft_window = 32 mean the same setting; give one": {
        "draft_context": "window:64",
        "draft_window": 32,
    },
    "strict = 1 must be true or false": {"strict": 1},
    "synthetic_acceptance_length = 0.5 is out of range; allowed: 1 or more": {"synthetic_acceptance_length": 0.5},
    "draft_sample_method True is not known; allowed: greedy, probabilistic": {"draft_sample_method": True},
    "a model of 1 layer(s) has no exit layer; at least 2 layers are needed": {"layers": 1},
}
"""Message -> settings that are wrong, or do not go together."""


@pytest.mark.parametrize(("text", "spec"), WRONG.items())
def test_of_settings_that_are_wrong_or_do_not_go_together(text, spec):
    assert said(read, **spec) == text


# ---- a head and a draft vocabulary that no file says -----------------------------------------------------------------


@pytest.mark.parametrize("value", [0, "0", True, ""])
def test_what_is_no_draft_vocabulary_is_refused(value):
    assert said(read, vocab=value) == (
        f"vocab = {value!r}: must be 'full', a number of tokens, 1 or more, or a file of token ids"
    )


def test_a_head_that_is_fitted_needs_its_file_and_the_message_says_how_to_make_it(tmp_path):
    message = said(read, layer_skip=3, head="translator")
    assert "selfspec fit model=MODEL head=translator layer=3" in message and "head_path" in message
    file = tmp_path / "layer3_lsq.pt"
    file.touch()
    assert read(layer_skip=3, head="lsq", head_path=str(file)).head.kind == "lsq"
    assert said(read, layer_skip=3, head="translator", head_path=str(file)) == (
        f"head = 'translator' and head_path = {str(file)!r}, which holds lsq: leave head out"
    )


# ---- thresholds and words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "threshold", "text"),
    [
        ("maxp", 0.0, f"with tau = 0 never closes {RANGE}: it is the same as gate 'none'"),
        ("maxp", 1.0, f"with tau = 1 never opens but for ties by rounding {RANGE}: drafts end after their first step"),
        ("maxp", 1.5, f"with tau = 1.5 never opens {RANGE}: every draft ends after its first step"),
        ("entropy", -1.0, f"with threshold = -1 never opens {NATS}: every draft ends after its first step"),
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
    near = closest("int3", ["shared", "fp8", "int8", "int4"], "draft_weights")
    assert near.endswith("did you mean 'int8' or 'int4'?")


# ---- what nobody gives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_default_thresholds_are_not_extreme(gate):
    assert warnings_for(DraftSettings(gate=GateConfig(gate), threshold=GATES[gate].default), vocab_size=4096) == []


def test_what_a_command_checks_before_it_starts_does_not_import_torch():
    code = (
        "import sys, selfspec_cli.early_exit.settings; from selfspec_cli.early_exit.gates import features; "
        "from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights; "
        "assert len(features()) > 5; assert {'shared', 'fp8'} <= set(DRAFT_WEIGHTS); "
        "assert all(kind.help for kind in DRAFT_WEIGHTS.values()); require_draft_weights('fp8', WeightFacts('cpu')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
