"""The file by which the draft's kernels are chosen, and what `selfspec tune-kernels` refuses; no kernel runs here
(tuning_interpreted.py)."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import call

from selfspec_cli.vllm_plugin import kernel_choice
from selfspec_cli.vllm_plugin.kernel_choice import DraftShape
from selfspec_cli.vllm_plugin.observe.watch import Watch

CONFIG = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": None,
    "vocab_size": 151936,
}
ROWS = [
    {"kind": "qkv", "tokens": 1, "setting": {"rows_at_once": 2, "at_once": 16}},
    {"kind": "qkv", "tokens": 8, "setting": {"rows_at_once": 16, "parts": 2, "stages": 2, "warps": 4}},
    {"kind": "attention", "tokens": 8, "context": 1024, "setting": {"splits": 4}},
    {"kind": "attention", "tokens": 8, "context": 32768, "setting": {"splits": 8}},
]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A file where an engine for CONFIG looks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = DraftShape.of(CONFIG, 4)
    path = kernel_choice.path_for("NVIDIA H100 80GB HBM3", shape)
    kernel_choice.write(path, "NVIDIA H100 80GB HBM3", shape, ROWS)
    assert path.is_relative_to(tmp_path) and path.name.startswith("NVIDIA_H100_80GB_HBM3_1536x8960")
    return path


def found(**instead):
    asked = {"config": CONFIG, "bits": 4, "ranks": 1, "device": "NVIDIA H100 80GB HBM3"} | instead
    return kernel_choice.for_engine(**asked)


def test_an_engine_finds_the_file_of_its_gpu_and_shape_alone(made):
    assert found().path == made and found().stale is None
    others = (
        {"bits": 8},
        {"bits": None},
        {"ranks": 2},
        {"device": "NVIDIA H200"},
        {"config": CONFIG | {"head_dim": 64}},
        {"config": {"n_embd": 64}},
    )
    assert [found(**one) for one in others] == [None] * 6
    assert found(config=CONFIG | {"vocab_size": 32000}).path == made  # of a draft vocabulary, say


def test_shapes_are_those_of_a_rank():
    shape = DraftShape.of(CONFIG, 4, ranks=2, vocabulary=32768)
    assert dict(shape.products) == {
        "qkv": (1024, 1536),
        "o": (1536, 768),
        "gate_up": (8960, 1536),
        "down": (1536, 4480),
        "lm_head": (16384, 1536),
    }
    assert (shape.query_heads, shape.heads, shape.dim) == (6, 1, 128)
    with pytest.raises(KeyError, match="intermediate_size"):
        DraftShape.of({"hidden_size": 64}, 4)


def test_a_size_between_two_has_what_the_next_greater_has_and_what_is_missing_is_named(made):
    choice = found()
    assert choice.of_product(2048, 1536, 4, 1) == ROWS[0]["setting"]
    assert choice.of_product(2048, 1536, 4, 3) == choice.of_product(2048, 1536, 4, 8) == ROWS[1]["setting"]
    assert choice.of_attention(12, 2, 128, 3, 1024) == {"splits": 4}
    assert choice.of_attention(12, 2, 128, 8, 2048) == {"splits": 8}
    assert choice.unchosen() == []
    assert "5 of 5 are chosen by" in str(choice) and "not" not in str(choice)
    assert choice.of_product(2048, 1536, 4, 16) == choice.of_product(2048, 1536, 8, 1) == {}
    assert choice.of_attention(12, 2, 128, 1, 40000) == choice.of_attention(12, 2, 128, 9, 64) == {}
    missing = [
        "qkv at 16",
        "[2048, 1536] of 8 bits at 1",
        "attention at 1 with room for 40000",
        "attention at 9 with room for 64",
    ]
    assert choice.unchosen() == missing
    assert str(choice) == f"5 of 9 are chosen by {made}; not {', '.join(missing)}"


def test_a_file_of_other_kernels_is_refused_and_all_that_it_was_for_counts(made, monkeypatch):
    made.write_text(json.dumps(json.loads(made.read_text()) | {"kernels": "of before"}))
    choice = found()
    assert choice.of_product(2048, 1536, 4, 1) == {}
    assert "was measured with other kernels or another Triton; run selfspec tune-kernels again" in str(choice)
    assert choice.unchosen() == ["qkv", "o", "gate_up", "down", "lm_head", "attention"]
    monkeypatch.setattr(kernel_choice, "_current", choice)
    assert counted() == {"unchosen_products": 6}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": 1, "bits": "x"}'])
def test_what_is_no_such_file_is_refused_with_a_reason(made, text):
    made.write_text(text)
    assert str(found()).startswith(f"none is chosen: {made} cannot be read (")
    assert found().unchosen()


def test_the_version_changes_with_the_source_of_each_kernel(tmp_path, monkeypatch):
    for name in kernel_choice.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(kernel_choice, "files", lambda package: tmp_path)
    versions = {kernel_choice.version()}
    for name in kernel_choice.SOURCES:
        (tmp_path / name).write_text(f"{name} with a change")
        versions.add(kernel_choice.version())
    assert len(versions) == len(kernel_choice.SOURCES) + 1


def counted():
    """What is counted of kernels on an engine that has drafted."""
    runner = SimpleNamespace(
        speculator=SimpleNamespace(head="a head", device="cpu", propose=None, decode_cudagraph_manager=None)
    )
    return {name: count for name, count in Watch(runner, runner.speculator).stop()["measured"].items() if count}


def test_what_ran_without_a_choice_is_counted_where_there_is_a_file(made, monkeypatch):
    choice = found()
    monkeypatch.setattr(kernel_choice, "_current", choice)
    choice.of_product(2048, 1536, 4, 8)
    assert counted() == {}
    choice.of_product(1536, 8960, 4, 8)
    assert counted() == {"unchosen_products": 1}


# ---- the command ----------------------------------------------------------------------------------------------------


def refused(*words):
    result = call("tune-kernels", "model=reference", *words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "tune-kernels times kernels on an NVIDIA GPU, and none can be seen here" in refused("draft_weights=int4")


def test_what_cannot_be_tuned_is_refused():
    assert "draft_weights=shared" in refused() and "allowed: int4, int8" in refused()
    assert "--tokens 33 is out of range; allowed: 1 to 32" in refused("draft_weights=int4", "--tokens", "1,33")
    assert "'x' is no whole number" in refused("draft_weights=int4", "--contexts", "x")
    assert "--tokens names no number" in refused("draft_weights=int4", "--tokens", ",")
    assert "groups of 64" in refused("draft_weights=int4", "model.hf_overrides.intermediate_size=500")


def test_a_dry_run_shows_the_products():
    result = call("tune-kernels", "model=reference", "draft_weights=int4", "vocab=1024", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["products"]["lm_head"] == [1024, 256]
