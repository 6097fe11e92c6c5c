"""Scripts of experiments/, docs/generate/ and tests/mutation/: what can be tried without a GPU."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from points import ARM, BASELINE, against, baseline
from scripts import importable

from selfspec_cli.record import folder, quality
from selfspec_cli.record.columns import Record
from selfspec_cli.record.quality import EVAL, Finding

ROOT = Path(__file__).resolve().parents[2]


def of(place):
    """A fixture that imports scripts of a folder by their names."""

    @pytest.fixture(scope="module")
    def script():
        with importable(ROOT / place) as module:
            yield module

    return script


rivals, figures = of("experiments/rivals"), of("docs/generate")


# ---- experiments/rivals: drafts made of a model, and the tables that show every setting


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
    tensors, config = rivals("drafts").first_layers(
        {name: torch.zeros(1) for name in names}, {"num_hidden_layers": 12, "hidden_size": 8}, 2
    )
    assert list(tensors) == names[:5]
    assert config == {"num_hidden_layers": 2, "hidden_size": 8}


def test_every_setting_that_was_measured_is_in_the_table(figures):
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
    assert [row.key for row in figures("figure_readme").arms(rows)] == ["gated", "n4", "e3", "n2", "e9"]


def test_where_another_method_wins_is_told_with_the_text_that_it_won_on(figures, tmp_path):
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
    (lost,) = figures("figure_readme").lost(tmp_path)
    assert (
        lost.startswith("ngram k=5 2.50x, where early exit was E=4 k=5")
        and " 1.50x (m, English documentation, " in lost
    )
    assert lost.endswith(f", batch 1, {baseline().device})")
    tables = figures("figure_readme").rivals_tables(tmp_path)
    assert tables.count("| vLLM ngram k=5 | 2.50x") == 1 and tables.index("Python (") < tables.index("English doc")
    assert "Nothing has been measured" in figures("figure_readme").rivals_tables(tmp_path / "none")


def test_a_head_for_a_kind_of_layer_that_speculators_lacks_is_llamas_of_the_same_size(rivals):
    transformers = pytest.importorskip("transformers")
    layer_of = rivals("eagle3").layer_of
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


# ---- docs/generate/figure_quality.py: the arms of one folder, matched by what they are called

SCORE = {"task": "t", "metric": "acc", "value": 0.5, "stderr": None, "samples": 4, "drafted": True, "same": 4}
QUALITY_ARM = {"arm": "layer_skip", "E": 4, "k": 4, "gate": "none"}


@pytest.fixture
def results(tmp_path):
    """Findings of an arm and of its baseline, as one machine found them."""
    for arm, key in ((QUALITY_ARM, "a" * 12), ({"arm": "baseline"}, "b" * 12)):
        named = (EVAL, key, "20261122-000000-aaaa", "2026-11-22T00:00:00+0000", "a machine")
        baseline = None if arm["arm"] == "baseline" else "b" * 12
        quality.save(tmp_path, Finding(*named, arm, baseline, {}, {"scores": [SCORE]}))
    return tmp_path


def verdict(results, arm, **more):
    """What `selfspec verify` found on another machine, where the same arm has another key."""
    folder = results / quality.VERDICTS
    folder.mkdir(exist_ok=True)
    document = {"verdict": "lossless", "arm_key": "c" * 12, "time": "2026-11-22", "cases": [], **more}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(document | ({"arm": arm} if arm else {})))


def test_a_verdict_is_told_of_the_arm_that_it_names_and_of_no_other(figures, results):
    verdict(results, QUALITY_ARM)
    verdict(results, {**QUALITY_ARM, "gate": "maxp"}, verdict="fault", arm_key="d" * 12)
    verdict(results, None, verdict="not shown", arm_key="e" * 12)  # of before verdicts named their arm
    lines = figures("figure_quality").cells(results)
    assert [(line[0], line[-1]) for line in lines] == [("baseline", ""), ("layer_skip E=4 k=4 gate=none", "lossless")]
    assert all("t acc 0.500" in line[-2] for line in lines)


# ---- tests/mutation


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["v2", "--module", "verdict", "--module", "v2/staet"], r"'v2/staet' .*allowed: verdict, state, .*'state'\?"),
        (["csots"], r"'csots' .*allowed: costs, .*'costs'\?"),
    ],
)
def test_a_module_or_a_suite_that_there_is_not_ends_mutation_testing_before_any_test_runs(
    words, said, monkeypatch, capsys
):
    pytest.importorskip("mutmut")
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        __import__("run").main()
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_equal_faults_in_one_function_are_two_mutants(tmp_path, monkeypatch):
    pytest.importorskip("mutmut")
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    module = tmp_path / "module.py"
    module.write_text("def f(a):\n    a += 1\n    print(a)\n    a += 1\n    return a\n")
    found = list(__import__("make").mutants_of(module, tmp_path))
    assert {mutant.line for mutant in found if mutant.now == "a += 2"} == {2, 4}
    keys = [__import__("run").key_of(vars(mutant)) for mutant in found]
    assert len(keys) == len(set(keys))
