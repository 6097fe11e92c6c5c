"""Settings: what users write is read, and what they must not write is refused with a helpful message."""

import json
import subprocess
import sys

import pytest

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.settings import DraftSettings, GateConfig, HeadConfig, to_spec
from selfspec_cli.early_exit.thresholds import calibration_from_dict, check_threshold, warnings_for

CALIBRATION = {"feature": "margin", "xs": [0.0, 0.5], "ps": [0.2, 0.9]}


def test_defaults_are_half_the_layers_and_five_tokens():
    assert ResolvedSettings.from_user({}, 12) == ResolvedSettings(layer=6, k=5)


def test_every_key_is_read():
    spec = {
        "method": "layer_skip",
        "layer_skip": 3,
        "num_speculative_tokens": 7,
        "lsq_head_path": "heads/a.safetensors",
        "gate": "maxp",
        "tau": 0.25,
    }
    head = HeadConfig(path="heads/a.safetensors")
    expected = ResolvedSettings(layer=3, k=7, head=head, gate=GateConfig("maxp"), threshold=0.25)
    assert ResolvedSettings.from_user(spec, 12) == expected


def test_alias_and_missing_values():
    read = ResolvedSettings.from_user({"head_path": "a.pt", "tau": None, "gate": None, "layer_skip": None}, 4)
    assert read == ResolvedSettings(layer=2, k=5, head=HeadConfig(path="a.pt"))


def test_draft_weights_are_the_targets_own_unless_copies_are_asked_for():
    assert ResolvedSettings.from_user({"draft_weights": None}, 4).draft_weights == "shared"
    settings = ResolvedSettings.from_user({"draft_weights": "fp8"}, 4)
    assert settings.draft_weights == "fp8"
    assert ResolvedSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(SettingsError, match="draft_weights 'int3'"):
        ResolvedSettings.from_dict({**settings.to_dict(), "draft_weights": "int3"})


def test_skip_does_not_verify():
    assert ResolvedSettings.from_user({"method": "skip", "layer_skip": 1}, 4).verify is False


def test_a_gate_without_threshold_gets_its_default():
    for name, rule in GATES.items():
        spec = {"gate": name, "calibration": CALIBRATION if name == "calibrated" else None}
        assert ResolvedSettings.from_user(spec, 4).threshold == rule.default


def test_passthrough_keys_belong_to_vllm():
    ResolvedSettings.from_user({"max_model_len": 128}, 4, passthrough={"max_model_len"})
    with pytest.raises(SettingsError, match="max_model_len"):
        ResolvedSettings.from_user({"max_model_len": 128}, 4)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"layer_skp": 3}, ["'layer_skp'", "did you mean 'layer_skip'?"]),
        ({"method": "layerskip"}, ["'layerskip'", "did you mean 'layer_skip'?"]),
        ({"gate": "varh"}, ["gate 'varh'", "none, adaedl, auto, calibrated", "did you mean 'varH'?"]),
        ({"gate": 3}, ["gate 3"]),
        ({"draft_weights": "fp9"}, ["draft_weights 'fp9'", "allowed: shared, ", "did you mean 'fp8'?"]),
        ({"draft_weights": "FP8"}, ["draft_weights 'FP8'", "did you mean 'fp8'?"]),
        ({"draft_weights": 8}, ["draft_weights 8", "allowed: shared, "]),
        ({"draft_wieghts": "fp8"}, ["'draft_wieghts'", "did you mean 'draft_weights'?"]),
        ({"method": "skip", "draft_weights": "fp8"}, ["draft_weights 'fp8'", "method 'skip'", "allowed: shared"]),
        ({"layer_skip": 12}, ["layer_skip = 12", "1 to 11", "12 layers"]),
        ({"layer_skip": 0}, ["layer_skip = 0", "1 to 11"]),
        ({"layer_skip": -1}, ["layer_skip = -1"]),
        ({"layer_skip": True}, ["layer_skip = True", "bool"]),
        ({"layer_skip": "4"}, ["layer_skip = '4'", "str"]),
        ({"layer_skip": 4.0}, ["layer_skip = 4.0", "float"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens = 0", "from 1 to 256"]),
        ({"num_speculative_tokens": False}, ["num_speculative_tokens = False"]),
        ({"gate": "maxp", "tau": 1.5}, ["tau = 1.5", "from 0 to 1"]),
        ({"gate": "maxp", "tau": -0.1}, ["tau = -0.1"]),
        ({"gate": "maxp", "tau": "0.5"}, ["tau = '0.5'", "number"]),
        ({"gate": "maxp", "tau": True}, ["tau = True", "number"]),
        ({"gate": "maxp", "tau": float("nan")}, ["finite"]),
        ({"gate": "varH", "tau_v": -1}, ["tau_v = -1", "at least 0"]),
        ({"gate": "varH", "tau": 0.5}, ["tau = 0.5", "not used by gate 'varH'", "tau_v", "maxp"]),
        ({"gate": "maxp", "tau_v": 4}, ["tau_v = 4", "not used by gate 'maxp'", "varH"]),
        ({"tau": 0.5}, ["tau = 0.5", "'none'", "maxp"]),
        ({"gate": "maxp", "tau": 0.5, "threshold": 0.5}, ["threshold and tau", "one"]),
        ({"lsq_head_path": "a", "head_path": "b"}, ["'a'", "'b'"]),
        ({"head_path": 3}, ["head_path = 3"]),
        ({"method": "skip", "gate": "maxp"}, ["'maxp'", "skip"]),
        ({"gate": "calibrated"}, ["calibration"]),
        ({"gate": "maxp", "calibration": CALIBRATION}, ["calibration", "'maxp'"]),
    ],
)
def test_bad_input_is_refused_by_name(spec, words):
    with pytest.raises(SettingsError) as caught:
        ResolvedSettings.from_user(spec, 12)
    for word in words:
        assert word in str(caught.value)


def test_a_model_of_one_layer_has_no_exit():
    with pytest.raises(SettingsError, match="no exit layer"):
        ResolvedSettings.from_user({}, 1)


@pytest.mark.parametrize(
    "settings",
    [
        ResolvedSettings(layer=3, k=5),
        ResolvedSettings(layer=3, k=1, head=HeadConfig(path="x.pt"), gate=GateConfig("varH"), threshold=4.5),
        ResolvedSettings(method="skip", layer=1, k=5),
        ResolvedSettings(layer=3, k=5, gate=GateConfig("calibrated", CALIBRATION), threshold=0.5),
        ResolvedSettings(layer=3, k=5, acceptance_length=2.5, draft_weights="fp8"),
    ],
)
def test_json_round_trip(settings):
    assert ResolvedSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layer": None}, "'layer' is missing"),
        ({"k": 0}, "k = 0"),
        ({"gate": {"kind": "x"}}, "gate.kind 'x'"),
        ({"lyer": 1}, "did you mean 'layer'"),
        ({"method": "ngram"}, "method 'ngram'"),
        ({"threshold": 0.5}, "threshold = 0.5"),
        ({"head": {"bias": True}}, "'head.bias' is not known"),
    ],
)
def test_from_dict_refuses_what_to_dict_cannot_have_written(change, word):
    with pytest.raises(SettingsError, match=word):
        ResolvedSettings.from_dict({**ResolvedSettings(layer=3, k=5).to_dict(), **change})


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"gate": "maxp", "tau": 0.2, "draft_weights": "fp8"},
        {"method": "skip"},
        {"gate": "calibrated", "calibration": CALIBRATION},
        {"lsq_head_path": "a"},
        {"gate": "varH", "draft_sample_method": "probabilistic"},
    ],
)
def test_what_a_config_writes_is_read_back(spec):
    vllms = ("draft_sample_method", "rejection_sample_method", "synthetic_acceptance_length")
    settings = ResolvedSettings.from_user({"layer_skip": 3, **spec}, 12, passthrough=vllms)
    assert ResolvedSettings.from_user(to_spec(settings), 12, passthrough=vllms) == settings


@pytest.mark.parametrize(
    ("gate", "threshold", "word"),
    [
        ("maxp", 0.0, "never closes"),
        ("maxp", 1.0, "never opens"),
        ("varH", 1e6, "never closes"),
        ("varH", 0.0, "never opens"),
        ("entropy", 20.0, "never closes"),
        ("entropy", 0.0, "never opens"),
        ("margin", 0.0, "never closes"),
        ("survival", 0.0, "never closes"),
        ("adaedl", 1.0, "never opens"),
    ],
)
def test_extreme_thresholds_are_named(gate, threshold, word):
    (warning,) = warnings_for(DraftSettings(gate=GateConfig(gate), threshold=threshold))
    assert word in warning
    assert repr(gate) in warning


@pytest.mark.parametrize("gate", [name for name in GATES if name != "calibrated"])
def test_default_thresholds_are_not_extreme(gate):
    assert warnings_for(DraftSettings(gate=GateConfig(gate), threshold=GATES[gate].default), vocab_size=4096) == []


def test_bounds_follow_the_vocabulary_and_the_calibration():
    entropy = DraftSettings(gate=GateConfig("entropy"), threshold=9.0)
    assert warnings_for(entropy, vocab_size=128_256) == []
    assert "never closes" in warnings_for(entropy, vocab_size=4096)[0]
    assert warnings_for(DraftSettings(gate=GateConfig("adaedl"), threshold=0.0)) == []  # the bound goes below 0
    gate = GateConfig("calibrated", CALIBRATION)
    low, high = (DraftSettings(gate=gate, threshold=t) for t in (0.1, 0.95))
    assert "never closes" in warnings_for(low)[0]
    assert "never opens" in warnings_for(high)[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"feature": "margn"}, "did you mean 'margin'"),
        ({"xs": [0.5, 0.5]}, "ascend"),
        ({"ps": [0.9, 0.2]}, "rising"),
        ({"feature": "entropy"}, "falling"),
        ({"ps": [0.2, 1.2]}, "between 0 and 1"),
        ({"ps": [0.2]}, "as many"),
        ({"xs": "ab"}, "list of finite numbers"),
        ({"knots": 3}, "'knots'"),
    ],
)
def test_bad_calibrations(change, word):
    with pytest.raises(SettingsError, match=word):
        calibration_from_dict({**CALIBRATION, **change})


def test_thresholds_for_a_live_engine():
    assert check_threshold("maxp", 1) == 1.0
    assert check_threshold("none", None) is None
    with pytest.raises(SettingsError, match="'nne'"):
        check_threshold("nne", None)


def test_closest_says_nothing_when_nothing_is_near():
    assert "did you mean" not in closest("zzzz", ["none", "maxp"])


def test_settings_do_not_import_torch():
    code = "import sys, selfspec_cli.early_exit.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("weights", "layer", "fine"), [("shared", 12, False), ("int4", 12, True), ("int4", 13, False)])
def test_copies_may_draft_with_all_layers(weights, layer, fine):
    spec = {"method": "layer_skip", "layer_skip": layer, "draft_weights": weights}
    if fine:
        assert ResolvedSettings.from_user(spec, 12).layer == layer
        return
    deepest = 11 + (weights != "shared")
    with pytest.raises(SettingsError, match=f"layer_skip = {layer} is out of range; allowed: 1 to {deepest}"):
        ResolvedSettings.from_user(spec, 12)
