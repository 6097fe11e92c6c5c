"""Tensor parallelism with two ranks on the CPU: the draft's copies and heads are split as the target's weights are."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exit_heads import translator_head
from harness import GATES, Counts, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny
from test_skip_and_heads import about

from selfspec_cli.early_exit.artifact import save_head

EXIT, K, HIDDEN, RANK = LAYERS // 2, 3, 64, 4
PROMPTS = ragged_prompts(8, VOCAB, seed=4)
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Four attention heads, so that each rank's rows of every weight divide into groups of 64 for integer copies.
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def no_binding(monkeypatch):
    """Two ranks share the cores that there are; vLLM would look for one each. They are eager, and their embedding is
    not compiled either."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("split")
    return cache(lambda name: save_tiny(name, root / name, **SHAPE))


def check(path: Path, view: dict[str, Any], bytes_of_head: int | None = None, **spec: Any) -> list[Counts]:
    """Two ranks generate with drafts what they generate without: as started, with another view, and under a gate.

    Without drafts is the same engine at a draft length of 0: starting two ranks is dear. bytes_of_head: what each rank
    keeps of a head, on the target's own weights."""
    found = []
    with live(path, layer_skip(EXIT, K, **spec), **RANKS) as engine:
        if bytes_of_head is not None:
            weights = engine.llm.collective_rpc("early_exit_weights")
            assert [share["draft"] for share in weights] == [bytes_of_head] * 2
        engine.call("early_exit_set_draft_length", 0)
        plain = tokens(engine.generate(PROMPTS, greedy(48)))
        assert engine.counts().drafted == 0
        for method, *words in (
            ("early_exit_set_draft_length", K),
            ("early_exit_set_view", {"layer_skip": EXIT, **view}),
            ("early_exit_set_gate", "margin", GATES["margin"]),
        ):
            engine.call(method, *words)
            found.append(engine.gives(PROMPTS, greedy(48), plain))
            found[-1].require_both_verdicts()
    return found


def test_two_ranks_draft_on_their_shares_of_weights_and_experts(model):
    *open_ones, gated = check(model("mixtral"), {"draft_weights": "int8"})
    for counts in open_ones:
        assert counts.accepted > 0.2 * counts.drafted, counts
    assert gated.drafted < 0.9 * K * gated.rounds, gated  # a round is one of one request


def test_a_small_vocabularys_rows_are_split_and_copies_of_them_too(model, tmp_path):
    """Behind a map of low rank, which each rank has whole."""
    path, few = model("llama"), torch.arange(0, VOCAB, 2)
    down, up = 0.02 * torch.randn(RANK, HIDDEN), 0.02 * torch.randn(HIDDEN, RANK)
    head = translator_head(down=down, up=up, vocab_ids=few)
    head_path = str(save_head(tmp_path / "head.safetensors", head, about(head, path)))
    check(
        path,
        {"draft_weights": "fp8"},
        lsq_head_path=head_path,
        bytes_of_head=4 * HIDDEN * len(few) // 2 + 4 * 2 * HIDDEN * RANK + 8 * len(few),
    )
