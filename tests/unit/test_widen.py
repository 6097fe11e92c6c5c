"""The widened reference model computes what the reference model computes."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from selfspec_cli.config import paths

pytestmark = pytest.mark.slow

SCRIPT = paths.experiments_dir() / "reference_model" / "widen.py"


def module():
    spec = importlib.util.spec_from_file_location("widen", SCRIPT)
    widen = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(widen)
    return widen


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


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_model_of_another_shape_is_widened_exactly(tmp_path, tied):
    """Three query heads for a KV head, as SmolLM2 has, and an lm_head of its own or none; fp32, to rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # norms that are not all ones
        layer.input_layernorm.weight.normal_(1, 0.3)
    model.save_pretrained(tmp_path / "narrow")
    (tmp_path / "narrow" / "chat_template.jinja").write_text("{{ messages }}")
    command = [sys.executable, SCRIPT, "--source", tmp_path / "narrow", "--hidden", "384", "--intermediate", "512"]
    subprocess.run([*command, "--out", tmp_path / "wide"], check=True, capture_output=True)
    narrow, wide = load(tmp_path / "narrow"), load(tmp_path / "wide")
    ids = torch.arange(128).view(4, 32)
    torch.testing.assert_close(wide(input_ids=ids).logits, narrow(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert wide.model.layers[0].mlp.gate_proj.weight.shape == (512, 384)
    assert (tmp_path / "wide" / "chat_template.jinja").is_file()


def test_biases_are_refused():
    with pytest.raises(ValueError, match="biases"):
        module().widened_config({"hidden_size": 64, "intermediate_size": 64, "attention_bias": True}, 256, 256)


def test_a_width_that_norms_cannot_follow_is_refused():
    widen = module()
    config = json.loads((paths.reference_model_dir() / "config.json").read_text())
    with pytest.raises(ValueError, match="hidden = 512: allowed are 256 times 1, 4"):
        widen.widened_config(config, 512, 512)
