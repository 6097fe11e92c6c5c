"""Operators that choose a kernel when they run, as far as no GPU is needed: the choice falls on PyTorch's."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import shared


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_operator_is_a_linear_layer(tokens, biased):
    x, weight, bias = torch.randn(tokens, 64), torch.randn(32, 64), torch.randn(32) if biased else None
    wanted = F.linear(x, weight, bias)
    assert torch.ops.selfspec.linear(x, weight, bias).equal(wanted)
    assert shared.linear(x, weight, bias).equal(wanted)
    assert shared.SharedLinear().apply(SimpleNamespace(weight=weight), x, bias).equal(wanted)
    torch.library.opcheck(torch.ops.selfspec.linear, (x, weight, bias))


def test_one_traced_graph_serves_every_number_of_tokens():
    weight = torch.randn(32, 64)
    compiled = torch.compile(
        lambda x: torch.ops.selfspec.linear(x, weight, None), fullgraph=True, dynamic=True, backend="eager"
    )
    for tokens in (5, 2, 9):
        x = torch.randn(tokens, 64)
        assert compiled(x).equal(F.linear(x, weight))


def test_a_graph_traced_with_many_tokens_multiplies_few_by_the_integer_copy(monkeypatch):
    from selfspec_cli.vllm_plugin.weights import few_tokens, lowbit, one_token, rounding

    seen = []
    monkeypatch.setattr(rounding, "round_tokens", lambda x, bits: (x, bits))
    for kernels in (one_token, few_tokens):
        product = lambda x, bits, *copy, by=kernels: seen.append((by, len(x), bits)) or x.new_zeros(len(x), 32)  # noqa: E731
        monkeypatch.setattr(kernels, "product", product)
    weight = torch.randn(32, 64)
    copy = DRAFT_WEIGHTS["int4"].quantise(weight)
    trace = make_fx(lambda x, copy, weight: lowbit.linear(x, copy, None, weight), tracing_mode="symbolic")
    traced = trace(torch.randn(70, 64), copy, weight)
    assert traced(x := torch.randn(lowbit.MOST + 1, 64), copy, weight).equal(F.linear(x, weight))
    assert not seen
    for tokens in (1, 7):  # vLLM drops the guards
        assert traced(torch.randn(tokens, 64), copy, weight).equal(torch.zeros(tokens, 32))
    assert seen == [(one_token, 1, 4), (few_tokens, 7, 4)]


def test_how_many_tokens_a_step_has_chooses_the_kernel_when_it_runs(monkeypatch):
    lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit", reason="Triton is not installed")
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
