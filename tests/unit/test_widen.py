"""The widened reference model computes what the reference model computes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from selfspec_cli.config import paths

SCRIPT = paths.experiments_dir() / "reference_model" / "widen.py"


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_logits_are_the_same_and_weights_are_not_zero(tmp_path):
    command = [sys.executable, str(SCRIPT), "--hidden", "1024", "--intermediate", "768", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    narrow, wide = load(paths.reference_model_dir()), load(tmp_path)
    ids = torch.arange(3, 259).view(4, 64)
    torch.testing.assert_close(wide(input_ids=ids).logits, narrow(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
    q = wide.model.layers[0].self_attn.q_proj.weight
    assert q.shape == (1024, 1024) and float(q[512:].std()) > 0.01


def test_a_width_that_norms_cannot_follow_is_refused():
    spec = importlib.util.spec_from_file_location("widen", SCRIPT)
    widen = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(widen)
    config = json.loads((paths.reference_model_dir() / "config.json").read_text())
    with pytest.raises(ValueError, match="hidden = 512: allowed are 256 times 1, 4"):
        widen.widened_config(config, 512, 512)
