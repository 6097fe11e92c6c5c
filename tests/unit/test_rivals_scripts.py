"""experiments/rivals/: drafts made of a model, and the tables that show every setting."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from points import ARM, BASELINE, against, baseline
from scripts import importable

from selfspec_cli.record import folder
from selfspec_cli.record.columns import Record

FOLDER = Path(__file__).parents[2] / "experiments" / "rivals"


@pytest.fixture(scope="module")
def script():
    """A script of the folder by its name."""
    with importable(FOLDER) as module:
        yield module


def test_weights_of_four_bits_are_packed_as_eight_to_an_integer(script):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = script("drafts").rounded(weight)
    assert packed.dtype == torch.int32 and (packed.shape, scale.shape) == ((6, 8), (6, 2))
    codes = (packed.unsqueeze(-1) >> (4 * torch.arange(8))) & 15
    back = (codes.reshape(6, 2, 32) - 8) * scale.unsqueeze(-1)
    error = (back - weight.reshape(6, 2, 32)).abs() / scale.unsqueeze(-1)
    assert error.max() <= 0.5 + 1e-4 and error.max() > 0.3
    with pytest.raises(SystemExit, match="33 inputs"):
        script("drafts").rounded(torch.randn(2, 33))


def test_a_draft_of_the_first_layers_keeps_norm_and_embedding(script):
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(12)]
    tensors, config = script("drafts").first_layers(
        {name: torch.zeros(1) for name in names}, {"num_hidden_layers": 12, "hidden_size": 8}, 2
    )
    assert list(tensors) == names[:5]
    assert config == {"num_hidden_layers": 2, "hidden_size": 8}


def test_every_setting_that_was_measured_is_in_the_table(script):
    base = Record("run", "now", "baseline", "m", speedup=1.0, key="b")
    ngram = Record("run", "now", "vllm", "m", k=2, speculative="ngram prompt_lookup_max=4", speedup=1.2, key="n2")
    early = Record("run", "now", "layer_skip", "m", k=3, gate="none", draft_weights="shared", speedup=1.5, key="e3")
    rows = [
        base,
        ngram,
        replace(ngram, k=4, speedup=1.6, key="n4"),
        early,
        replace(early, k=9, speedup=1.1, key="e9"),
        replace(early, gate="margin", speedup=1.7, key="gated"),
        replace(ngram, speculative="suffix", speedup=9.0, status="failed: no", key="s"),
    ]
    assert [row.key for row in script("table").arms(rows)] == ["gated", "n4", "e3", "n2", "e9"]


def test_where_another_method_wins_is_told_with_the_text_that_it_won_on(script, tmp_path):
    ngram = {name: value for name, value in ARM.items() if name not in ("E", "head", "vocab", "gate", "threshold")}
    ngram |= {"arm": "vllm", "speculative": "ngram"}
    for number, (text, speed) in enumerate({"headline": 120.0, "prose": 250.0}.items()):
        keys = "048"[number], "15"[number], "26"[number]
        base = replace(baseline(keys[0]), arm=BASELINE | {"workload": text})
        for point in (
            base,
            against(base, keys[1], arm=ARM | {"workload": text}),
            against(base, keys[2], speed, speed, speed, arm=ngram | {"workload": text}),
        ):
            folder.save(tmp_path / "cpu", point)
    (lost,) = script("table").lost(tmp_path)
    assert (
        lost.startswith("ngram k=5 2.50x, where early exit was E=4 k=5")
        and " 1.50x (m, English documentation, " in lost
    )
    assert lost.endswith(f", batch 1, {baseline().device})")
    tables = script("table").rivals_tables(tmp_path)
    assert tables.count("| vLLM ngram k=5 | 2.50x") == 1 and tables.index("Python (") < tables.index("English doc")
    assert "Nothing has been measured" in script("table").rivals_tables(tmp_path / "none")


def test_a_head_for_a_kind_of_layer_that_speculators_lacks_is_llamas_of_the_same_size(script):
    transformers = pytest.importorskip("transformers")
    layer_of = script("eagle3").layer_of
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 50,
    }
    of = {kind: layer_of(transformers.AutoConfig.for_model(kind, **sizes)) for kind in ("qwen2", "qwen3")}
    assert [(kind, made.model_type, made.num_hidden_layers) for kind, made in of.items()] == [
        ("qwen2", "llama", 1),
        ("qwen3", "qwen3", 1),
    ]
    same = sizes.keys() - {"num_hidden_layers"}
    assert {name: getattr(of["qwen2"], name) for name in same} == {name: sizes[name] for name in same}
    wide = layer_of(transformers.AutoConfig.for_model("gemma", **sizes, head_dim=16))
    assert (wide.model_type, wide.head_dim) == ("llama", 16)
