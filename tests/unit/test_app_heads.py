"""`selfspec fit`, with and without --compare: what it hands on, and what it refuses before any engine starts."""

from dataclasses import dataclass, field

import pytest
import torch
from commands import call, document, model_folder, stand_in
from exit_heads import lsq_head

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_spec import examples
from selfspec_cli.record.head_rows import HeadRow


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


@dataclass
class Found:
    rows: list
    best: HeadRow | None = None
    files: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)
    exit_code: int = 0

    def document(self):
        return {"rows": len(self.rows)}


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


@pytest.mark.parametrize("corpus", ["gone.json", "hf:a:train:text:more"])
@pytest.mark.parametrize("command", [("fit",), ("fit", "--compare")])
def test_a_corpus_that_there_is_not_is_refused_by_a_dry_run_too(model, command, corpus):
    result = call(*command, "head=lsq", "layer=2", model, "--corpus", corpus, "--dry-run")
    assert result.exit_code == 2
    assert f"corpus={corpus}" in result.stderr


def test_heads_compares_everything_at_four_depths_by_default(monkeypatch, model, tmp_path):
    plans = []

    def run(plan, **more):
        plans.append((plan, more["top"]))
        return Found([HeadRow("m", 2, "lens", "full", 0.5)])

    stand_in(monkeypatch, "selfspec_cli.stages.heads", run)
    result = call("fit", "--compare", model, "--top", "3")
    assert result.exit_code == 0, result.output
    assert "lens" in result.stdout
    assert (tmp_path / "results" / "heads.png").stat().st_size > 1000
    plan, top = plans[0]
    assert (plan.layers, plan.vocabularies, tuple(plan.heads), top) == (
        (1, 2, 4, 6),
        ("full", "16"),
        examples(),
        3,
    )
    assert document(call("fit", "--compare", "layer=3", "head=lens,lsq", model, "--json")) == {"rows": 1}
    assert (plans[1][0].layers, list(plans[1][0].heads)) == ((3,), ["lens", "lsq"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fit", "layer=2"), "is not fitted; name what is"),
        (("fit", "head=lsq", "layer=12"), "1..11"),
        (("fit", "head=lsq", "layer=2", "vocab=gone.txt"), "a file of token ids"),
        (("fit", "head=lsq", "head.target=argmax", "layer=2"), "use head=lsq_argmax"),
        (("fit", "head=lsq", "head.path=a.pt", "layer=2"), "fitted here, not read"),
        (("fit", "head=lsq", "layer=2", "workload.batch=1,2"), "one model, engine and workload"),
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
    ],
)
def test_a_head_that_cannot_be_used_is_refused_before_an_engine_starts(file, expected, model, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 12, "vocab_size": 64, "hidden_size": 4}')
    (tmp_path / "random.safetensors").write_bytes(b"\x7f" * 300)
    for name, layer, hidden in (("layer5_lsq", 5, 4), ("layer2_wide", 2, 8)):
        head = lsq_head(torch.zeros(64, hidden))
        save_head(tmp_path / f"{name}.safetensors", head, HeadMetadata("lsq", layer, hidden, 64))
    for more in ((), ("--dry-run",)):
        result = call("sweep", f"head.path={file}", "layer=2", model, *more)
        assert result.exit_code == 2, result.output
        assert expected in " ".join(result.stderr.split())
