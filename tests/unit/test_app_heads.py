"""`selfspec fit`: what it hands on, and what it refuses before any engine starts."""

from dataclasses import dataclass, field

import pytest
import torch
from commands import call, document, model_folder, stand_in
from exit_heads import lsq_head

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.head_metadata import HeadMetadata


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A folder that looks like a model of twelve layers and 64 tokens; the test runs beside it."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", num_hidden_layers=12, vocab_size=64)
    (tmp_path / "chats.json").write_text("[]")
    return f"model={folder}"


@dataclass
class Fitted:
    reports: list
    seconds: float = 1.0
    warnings: list = field(default_factory=list)


def test_fit_hands_on_the_grid(monkeypatch, model):
    asked = {}

    def run(cfg, **more):
        asked.update(more, path=cfg.model.path)
        return Fitted([{"layer": 2, "kind": "lsq", "head": "lsq_argmax", "vocab": "16", "agreement": 0.5, "path": "a"}])

    stand_in(monkeypatch, "selfspec_cli.stages.fit", run)
    words = ("fit", "head=lsq_argmax,translator_r15", "layer=2,4", "vocab=full,16", model, "--ridge", "0.5")
    result = call(*words, "--pairs", "70", "--corpus", "chats.json")
    assert result.exit_code == 0, result.output
    assert "lsq_argmax 16" in result.stdout
    assert asked.pop("progress") and asked.pop("open_engine")
    assert asked.pop("path") == model.partition("=")[2]
    grid = {"layers": (2, 4), "heads": ("lens", "lsq_argmax", "translator_r15"), "vocabularies": ("full", "16")}
    assert asked == grid | {"pairs": 70, "ridge": 0.5, "corpus": "chats.json"}
    asked.clear()
    assert document(call(*words, "--dry-run", "--json"))["heads"] == ["lens", "lsq_argmax", "translator_r15"]
    assert not asked


@pytest.mark.parametrize("corpus", ["gone.json", "hf:org/set"])
def test_a_corpus_that_there_is_not_is_refused_by_a_dry_run_too(model, corpus):
    result = call("fit", "head=lsq", "layer=2", model, "--corpus", corpus, "--dry-run")
    assert result.exit_code == 2
    assert f"corpus={corpus}" in result.stderr


def test_a_rank_of_ones_own(monkeypatch, model):
    found = document(call("fit", "head=translator_r20,translator_r30", "layer=2", model, "--dry-run", "--json"))
    assert found["heads"] == ["lens", "translator_r20", "translator_r30"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fit", "head=lsq_argmx", "layer=2"), "'lsq_argmax'"),
        (("fit", "layer=2"), "is not fitted; name what is"),
        (("fit", "head=lsq", "layer=12"), "1..11"),
        (("fit", "head=lsq", "layer=0"), "layer=0"),
        (("fit", "head=lsq"), "layer=null"),
        (("fit", "head=lsq", "layer=2", "vocab=65"), "larger than the vocabulary; must be in 1..64"),
        (("fit", "head=lsq", "layer=2", "vocab=gone.txt"), "a file of token ids"),
        (("fit", "head=lsq_r3", "layer=2"), "kind lsq has no rank 3; kinds that can: translator"),
        (("fit", "head=lsq", "head.path=a.pt", "layer=2"), "fitted here, not read"),
        (("fit", "head=lsq", "layer=2", "workload.batch=1,2"), "one model, engine and workload"),
        (("bench", "head=lsq_argmax", "layer=2"), "selfspec fit head=lsq_argmax layer=2"),
        (("sweep", "head=lens", "layer=2", "vocab=full,65"), "must be in 1..64"),
    ],
)
def test_bad_input_is_a_short_message_and_exit_code_2(words, expected, model):
    result = call(*words, model)
    assert result.exit_code == 2, result.output
    assert expected in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) < 15


def test_a_pt_file_with_anything_but_tensors_is_refused_before_an_engine_starts(model, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.nn.Linear(2, 2)}, tmp_path / "h2.pt")
    result = call("bench", "head=lsq", f"head.path={tmp_path / 'h2.pt'}", "layer=2", model)
    assert result.exit_code == 2
    assert "something other than tensors" in result.stderr


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("random.safetensors", "truncated or no safetensors file"),
        ("layer5_lsq.safetensors", "is for layer 5; layer 2 is asked for"),
        ("layer2_wide.safetensors", "its hidden is 8, this model's is 4"),
        ("layer2_many.safetensors", "its vocab_size is 65, this model's is 64"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_head_that_cannot_be_used_is_refused_before_an_engine_starts(file, expected, more, model, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 12, "vocab_size": 64, "hidden_size": 4}')
    (tmp_path / "random.safetensors").write_bytes(b"\x7f" * 300)
    for name, layer, hidden, vocab in (("layer5_lsq", 5, 4, 64), ("layer2_wide", 2, 8, 64), ("layer2_many", 2, 4, 65)):
        head = lsq_head(torch.zeros(vocab, hidden))
        save_head(tmp_path / f"{name}.safetensors", head, HeadMetadata("lsq", layer, hidden, vocab))
    result = call("sweep", f"head.path={file}", "layer=2", model, *more)
    assert result.exit_code == 2, result.output
    assert expected in " ".join(result.stderr.split())
