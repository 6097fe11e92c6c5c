"""Tensor parallelism with two ranks on the CPU: the draft's copies and heads are split as the target's weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exit_heads import lens_head
from harness import Counts, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.fingerprint import model_fingerprint
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead

pytestmark = pytest.mark.engine

EXIT, K, HIDDEN = LAYERS // 2, 3, 64
PROMPTS = ragged_prompts(8, VOCAB, seed=4)
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Four attention heads, so that each rank's rows of every weight divide into groups of 64 for integer copies.
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def no_binding(monkeypatch):
    """Two ranks share the cores that there are; vLLM would look for one each."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@dataclass(frozen=True)
class Split:
    """What two ranks generate without drafts."""

    path: Path
    outputs: list[list[int]]

    def check(self, **spec: Any) -> Counts:
        """Two ranks that draft generate the same; returns what vLLM counted."""
        with live(self.path, layer_skip(EXIT, K, **spec), **RANKS) as engine:
            assert tokens(engine.generate(PROMPTS, greedy(48))) == self.outputs
            counts = engine.counts()
        counts.require_both_verdicts()
        return counts


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Callable[[str], Split]:
    root = tmp_path_factory.mktemp("split")

    @cache
    def generate(name: str) -> Split:
        path = save_tiny(name, root / name, **SHAPE)
        with live(path, **RANKS) as engine:
            return Split(path, tokens(engine.generate(PROMPTS, greedy(48))))

    return generate


def saved(head: ExitHead, path: Path, folder: Path) -> str:
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    mark = model_fingerprint(config, [("embed_tokens.weight", embedding)])
    about = HeadMetadata(
        kind=head.kind.name, layer=EXIT, hidden=HIDDEN, vocab_size=VOCAB, rank=head.rank, fingerprint=mark
    )
    return str(save_head(folder / "head.safetensors", head, about))


CASES = [("llama", "shared"), ("llama", "fp8"), ("mixtral", "int8")]


@pytest.mark.parametrize(("name", "weights"), CASES, ids=[" ".join(case) for case in CASES])
def test_two_ranks_draft_on_their_shares(plain, name, weights):
    counts = plain(name).check(draft_weights=weights)
    assert counts.accepted > 0.2 * counts.drafted, counts


def test_copies_of_a_small_vocabularys_rows_are_split_too(plain, tmp_path):
    head, want = lens_head(torch.arange(0, VOCAB, 2)), plain("llama")
    want.check(draft_weights="fp8", lsq_head_path=saved(head, want.path, tmp_path))
