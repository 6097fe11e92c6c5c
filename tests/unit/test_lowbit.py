"""Which kernels multiply by integer copies, as far as no GPU is needed."""

import pytest
import torch
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit", reason="Triton or vLLM is not installed")


def test_how_many_tokens_a_step_has_chooses_the_kernel_when_it_runs(monkeypatch):
    turns = []

    def product(tokens, rounded, *others):
        turns.append(tokens)
        return rounded.sum(1, keepdim=True).expand(-1, 64)

    monkeypatch.setattr(lowbit, "_product", product)
    monkeypatch.setattr(lowbit, "none_arrived", lambda device: None)
    monkeypatch.setattr(lowbit.rounding, "round_tokens", lambda x, bits: (x, x))
    weight = torch.randn(64, 128)
    copy = lowbit.prepare(DRAFT_WEIGHTS["int4"].quantise(weight))
    cases = [(1, [1]), (32, [32]), (33, [32, 1]), (64, [32, 32])]
    for own, tokens, wanted in [(weight, *case) for case in cases] + [(None, 65, [32, 32, 1])]:
        turns.clear()
        x = torch.randn(tokens, 128)
        assert lowbit.linear(x, copy, None, own).equal(x.sum(1, keepdim=True).expand(-1, 64))
        assert turns == wanted
    assert lowbit.linear(x, copy, None, weight).equal(F.linear(x, weight))  # more tokens than copies pay for
    for tokens in (32, 33):
        turns.clear()
        monkeypatch.setattr(lowbit, "_product", lambda tokens, *others, **more: turns.append(tokens))
        lowbit.compile_for(tokens, copy, None, torch.bfloat16)
        assert turns == ([32] if tokens == 32 else [])
