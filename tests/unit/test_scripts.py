"""Scripts of experiments/, docs/generate/ and tests/mutation/: what can be tried without a GPU."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from points import ARM, BASELINE, against, baseline
from scripts import importable

from selfspec_cli.record import folder

ROOT = Path(__file__).resolve().parents[2]


def of(place):
    """A fixture that imports scripts of a folder by their names."""

    @pytest.fixture(scope="module")
    def script():
        with importable(ROOT / place) as module:
            yield module

    return script


rivals, figures, mutation = of("experiments/rivals"), of("docs/generate"), of("tests/mutation")


# ---- experiments/rivals: drafts made of a model, and where another method was faster


def test_weights_of_four_bits_are_packed_as_eight_to_an_integer(rivals):
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = rivals("drafts").rounded(weight)
    assert packed.dtype == torch.int32 and (packed.shape, scale.shape) == ((6, 8), (6, 2))
    codes = (packed.unsqueeze(-1) >> (4 * torch.arange(8))) & 15
    back = (codes.reshape(6, 2, 32) - 8) * scale.unsqueeze(-1)
    error = (back - weight.reshape(6, 2, 32)).abs() / scale.unsqueeze(-1)
    assert error.max() <= 0.5 + 1e-4 and error.max() > 0.3
    with pytest.raises(SystemExit, match="33 inputs"):
        rivals("drafts").rounded(torch.randn(2, 33))


def test_a_draft_of_the_first_layers_keeps_norm_and_embedding(rivals):
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(12)]
    weights, shape = {name: torch.zeros(1) for name in names}, {"num_hidden_layers": 12, "hidden_size": 8}
    tensors, config = rivals("drafts").first_layers(weights, shape, 2)
    assert list(tensors) == names[:5]
    assert config == {"num_hidden_layers": 2, "hidden_size": 8}


def test_where_another_method_wins_is_told_with_the_text_that_it_won_on(figures, tmp_path):
    ngram = BASELINE | {"arm": "vllm", "speculative": "ngram", "k": 5}
    for text, speed, keys in (("headline", 120.0, "012"), ("prose", 250.0, "456")):
        base = replace(baseline(keys[0]), arm=BASELINE | {"workload": text})
        ours = against(base, keys[1], arm=ARM | {"workload": text})
        theirs = against(base, keys[2], speed, speed, speed, arm=ngram | {"workload": text})
        for point in (base, ours, theirs):
            folder.save(tmp_path / "cpu", point)
    (lost,) = figures("figure_tables").lost(tmp_path)
    assert lost.startswith("ngram k=5 2.50x, where early exit was E=4 k=5")
    assert " 1.50x (m, English documentation, " in lost
    assert lost.endswith(f", batch 1, {baseline().device})")
    assert list(figures("figure_tables").lost(tmp_path / "none")) == []


def test_a_head_for_a_kind_of_layer_that_speculators_lacks_is_llamas_of_the_same_size(rivals):
    transformers = pytest.importorskip("transformers")
    layer_of = rivals("eagle3").layer_of
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}

    def layer(kind, **more):
        return layer_of(transformers.AutoConfig.for_model(kind, **sizes, **more, num_hidden_layers=3))

    made, own, wide = layer("qwen2"), layer("qwen3"), layer("gemma", head_dim=16)
    assert [of.model_type for of in (made, own, wide)] == ["llama", "qwen3", "llama"]
    assert made.num_hidden_layers == own.num_hidden_layers == 1
    assert {name: getattr(made, name) for name in sizes} == sizes
    assert wide.head_dim == 16


# ---- tests/mutation


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["v2", "--module", "runner", "--module", "v2/staet"], r"'v2/staet' .*allowed: state, runner, .*'state'\?"),
        (["csots"], r"'csots' .*allowed: costs, .*'costs'\?"),
    ],
)
def test_a_module_or_a_suite_that_there_is_not_ends_mutation_testing_before_any_test_runs(
    mutation, words, said, monkeypatch, capsys
):
    pytest.importorskip("mutmut")
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        mutation("run").main()
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_equal_faults_in_one_function_are_two_mutants(mutation, tmp_path):
    pytest.importorskip("mutmut")
    module = tmp_path / "module.py"
    module.write_text("def f(a):\n    a += 1\n    print(a)\n    a += 1\n    return a\n")
    found = list(mutation("make").mutants_of(module, tmp_path))
    assert {mutant.line for mutant in found if mutant.now == "a += 2"} == {2, 4}
    keys = [mutation("run").key_of(vars(mutant)) for mutant in found]
    assert len(keys) == len(set(keys))
