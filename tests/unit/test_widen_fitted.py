"""Copies that were widened with their model multiply as the small ones do, padded with zeros."""

from __future__ import annotations

import pytest
import torch
from scripts import importable

from selfspec_cli.config import paths
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, About, FittedWeights

OLD = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
       "vocab_size": 40}  # fmt: skip
NEW = OLD | {"hidden_size": 512, "intermediate_size": 320, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 32}  # fmt: skip
LAYERS = {
    "layers.0.self_attn.qkv_proj": [(128, 512), (64, 256), (64, 256)],
    "layers.0.self_attn.o_proj": [(128, 512)],
    "layers.0.mlp.gate_up_proj": [(192, 320), (192, 320)],
    "layers.0.mlp.down_proj": [(128, 512)],
    LM_HEAD: [(40, 40)],
}
"""By name, the rows of each part before and after."""
COLUMNS = {"o_proj": (128, 512), "down_proj": (192, 320)}


@pytest.fixture(scope="module")
def script():
    with importable(paths.experiments_dir() / "views") as module:
        yield module("widen_fitted")


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", LAYERS)
def test_products_are_those_of_the_small_copy(script, kind, name):
    torch.manual_seed(0)
    rows, (narrow, wide) = LAYERS[name], COLUMNS.get(name.rpartition(".")[2], (128, 512))
    weights = DRAFT_WEIGHTS[kind]
    copy = weights.quantise(torch.randn(sum(old for old, _ in rows), narrow))
    small = FittedWeights(About(kind, "small"), {name: copy})
    made = script.widened_fitted(small, OLD, NEW, "wide")
    assert made.about == About(kind, "wide")
    x = torch.randn(3, narrow)
    padded = torch.nn.functional.pad(x, (0, wide - narrow))
    weight = weights.dequantise(made.copies[name], torch.float32)
    assert weight.shape == (sum(new for _, new in rows), wide)
    before, after = x @ weights.dequantise(copy, torch.float32).T, padded @ weight.T
    at = start = 0
    for old, new in rows:
        torch.testing.assert_close(after[:, start : start + old], before[:, at : at + old])
        at, start = at + old, start + new
    assert weight.isfinite().all()
    if name.endswith(("o_proj", "down_proj")):  # what writes to the residual stream writes zeros to its new entries
        assert not (torch.randn(3, wide) @ weight.T)[:, 128:].any()


def test_new_rows_that_nothing_reads_are_noise(script):
    name = "layers.0.mlp.gate_up_proj"
    copy = DRAFT_WEIGHTS["int4"].quantise(torch.randn(384, 128))
    weight = DRAFT_WEIGHTS["int4"].dequantise(script.widened_copy(copy, name, OLD, NEW), torch.float32)
    assert weight[192:320].std() > 0.001 and not weight[:192, 128:].any()
