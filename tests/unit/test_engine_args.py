from dataclasses import replace

import pytest

from selfspec_cli.config import EngineConfig, GateConfig, GateKind, Method, RunConfig, Verification
from selfspec_cli.engine_args import speculative_config

GPU = RunConfig(engine=EngineConfig(name="h100"), layer=3, k=4, gate=GateConfig(GateKind.varH), tau_v=5.0)


def test_a_config_becomes_what_a_user_would_write(tmp_path):
    assert speculative_config(GPU, tmp_path) == {
        "method": "layer_skip",
        "layer_skip": 3,
        "head_path": None,
        "num_speculative_tokens": 4,
        "draft_weights": "shared",
        "gate": "varH",
        "threshold": 5.0,
        "calibration": None,
    }
    assert speculative_config(replace(GPU, method=Method.baseline), tmp_path) is None


@pytest.mark.parametrize(("verification", "asked"), [(Verification.full, None), (Verification.adaptive, True)])
def test_adaptive_verification_is_vllms_own_key(verification, asked, tmp_path):
    spec = speculative_config(replace(GPU, verification=verification), tmp_path)
    assert spec.get("enable_adaptive_verification") is asked
