"""Settings: what users write is read, and what they must not write is refused with a helpful message."""

import json
import subprocess
import sys

import pytest

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.resolved import ResolvedSettings, warnings_for
from selfspec_cli.early_exit.settings import DraftSettings, GateConfig, HeadConfig


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


def test_a_gate_without_threshold_gets_its_default():
    for name, rule in GATES.items():
        assert ResolvedSettings.from_user({"gate": name}, 4).threshold == rule.default


def test_passthrough_keys_belong_to_vllm():
    ResolvedSettings.from_user({"max_model_len": 128}, 4, passthrough={"max_model_len"})
    with pytest.raises(SettingsError, match="max_model_len"):
        ResolvedSettings.from_user({"max_model_len": 128}, 4)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"method": "layerskip"}, ["'layerskip'", "did you mean 'layer_skip'?"]),
        ({"gate": "varh"}, ["gate 'varh'", "none, adaedl, auto, entropy", "did you mean 'varH'?"]),
        ({"gate": 3}, ["gate 3"]),
        ({"draft_weights": "fp9"}, ["draft_weights 'fp9'", "allowed: shared, ", "did you mean 'fp8'?"]),
        ({"draft_weights": 8}, ["draft_weights 8", "allowed: shared, "]),
        ({"layer_skip": 0}, ["layer_skip = 0", "1 to 11"]),
        ({"layer_skip": "4"}, ["layer_skip = '4'", "str"]),
        ({"num_speculative_tokens": False}, ["num_speculative_tokens = False"]),
        ({"gate": "maxp", "tau": -0.1}, ["tau = -0.1"]),
        ({"gate": "maxp", "tau": True}, ["tau = True", "number"]),
        ({"gate": "maxp", "tau_v": 4}, ["tau_v = 4", "not used by gate 'maxp'", "varH"]),
        ({"head_path": 3}, ["head_path = 3"]),
    ],
)
def test_bad_input_is_refused_by_name(spec, words):
    with pytest.raises(SettingsError) as caught:
        ResolvedSettings.from_user(spec, 12)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("gate", GATES)
def test_default_thresholds_are_not_extreme(gate):
    assert warnings_for(DraftSettings(gate=GateConfig(gate), threshold=GATES[gate].default), vocab_size=4096) == []


def test_bounds_follow_the_vocabulary():
    entropy = DraftSettings(gate=GateConfig("entropy"), threshold=9.0)
    assert warnings_for(entropy, vocab_size=128_256) == []
    assert "never closes" in warnings_for(entropy, vocab_size=4096)[0]
    assert warnings_for(DraftSettings(gate=GateConfig("adaedl"), threshold=0.0)) == []  # the bound goes below 0


def test_what_a_command_checks_before_it_starts_does_not_import_torch():
    code = (
        "import sys, selfspec_cli.early_exit.settings; from selfspec_cli.early_exit.gates import features; "
        "from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights; "
        "assert len(features()) > 5; assert {'shared', 'fp8'} <= set(DRAFT_WEIGHTS); "
        "assert all(kind.help for kind in DRAFT_WEIGHTS.values()); require_draft_weights('fp8', WeightFacts('cpu')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
