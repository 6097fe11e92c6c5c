"""A head that was widened with its model reads and writes the same numbers, padded with zeros."""

from pathlib import Path

import pytest
import torch
from scripts import importable
from torch.nn.functional import rms_norm

HIDDEN, RATIO, EPS = 8, 4, 1e-5
OLD = {
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": EPS,
}


@pytest.fixture(scope="module")
def script():
    """experiments/rivals/widen_eagle3.py."""
    with importable(Path(__file__).parents[2] / "experiments" / "rivals") as module:
        yield module("widen_eagle3")


def padded(x):
    """n vectors beside each other, each with zeros behind it."""
    zeros = x.new_zeros(len(x), HIDDEN * (RATIO - 1))
    return torch.cat([torch.cat([part, zeros], 1) for part in x.split(HIDDEN, 1)], 1)


def test_the_state_and_the_first_layers_inputs_are_those_of_the_small_head(script):
    torch.manual_seed(1)
    small = {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN),
        "layers.0.hidden_norm.weight": torch.rand(HIDDEN) + 0.5,
        "layers.0.self_attn.q_proj.weight": torch.randn(8, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": torch.randn(4, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": torch.randn(HIDDEN, 8),
        "layers.0.mlp.down_proj.weight": torch.randn(HIDDEN, 12),
        "lm_head.weight": torch.randn(20, HIDDEN),
        "embed_tokens.weight": torch.randn(20, HIDDEN),
    }
    new = script.widened_config(OLD, HIDDEN * RATIO, 20)
    wide = script.widened_head(small, OLD, new)
    assert wide.keys() == small.keys() - {"lm_head.weight", "embed_tokens.weight"}, "vLLM takes these from the model"
    shapes = {name: tuple(tensor.shape) for name, tensor in wide.items() if tensor.dim() == 2}
    assert shapes == {
        "fc.weight": (32, 96),
        "layers.0.self_attn.q_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.mlp.down_proj.weight": (32, 20),
    }

    states, embeds = torch.randn(5, 3 * HIDDEN), torch.randn(5, HIDDEN)
    state = states @ small["fc.weight"].T
    wide_state = padded(states) @ wide["fc.weight"].T
    torch.testing.assert_close(wide_state, padded(state))
    name = "layers.0.hidden_norm.weight"
    normed = rms_norm(state, (HIDDEN,), small[name], EPS)
    wide_normed = rms_norm(wide_state, (HIDDEN * RATIO,), wide[name], new["rms_norm_eps"])
    torch.testing.assert_close(wide_normed, padded(normed))
    for part, rows in (("q", 8), ("k", 4)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        made = padded(torch.cat([embeds, normed], 1)) @ wide[name].T
        torch.testing.assert_close(made[:, :rows], torch.cat([embeds, normed], 1) @ small[name].T)
    out = wide["layers.0.self_attn.o_proj.weight"]
    assert not out[HIDDEN:].any() and not out[:, 8:].any(), "it writes nothing of the new heads, and only old entries"
