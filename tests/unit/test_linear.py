"""Products whose kernel is chosen when they run, and which are compiled ahead, as far as no GPU is needed."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import shared
from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear


@pytest.fixture
def lowbit():
    pytest.importorskip("triton")
    from selfspec_cli.vllm_plugin.weights import lowbit

    return lowbit


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_operator_is_a_linear_layer(tokens, biased):
    x, weight, bias = torch.randn(tokens, 64), torch.randn(32, 64), torch.randn(32) if biased else None
    wanted = F.linear(x, weight, bias)
    assert torch.ops.selfspec.linear(x, weight, bias).equal(wanted)
    assert shared.linear(x, weight, bias).equal(wanted)
    assert shared.SharedLinear().apply(SimpleNamespace(weight=weight), x, bias).equal(wanted)
    torch.library.opcheck(torch.ops.selfspec.linear, (x, weight, bias))


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


def test_how_many_tokens_a_step_has_chooses_the_kernel_when_it_runs(lowbit, monkeypatch):
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


# ---- compiled ahead --------------------------------------------------------------------------------------------------


class Copy(nn.Module):
    """A copy [rows, columns], which notes what it is compiled for."""

    def __init__(self, rows, columns, noted=None):
        super().__init__()
        self.words = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        self.noted = noted

    def compile_for(self, tokens, bias):
        self.noted.append((tuple(self.words.shape), tokens, bias))
        if tokens == 8:
            raise RuntimeError("can't start new thread")


def layer(rows, columns, bias=False, noted=None, **more):
    made = nn.Module()
    made.quant_method, made.copy_of_weight = CopiedLinear(), Copy(rows, columns, noted)
    made.bias = torch.zeros(rows) if bias else None
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 32]), (256, [1, 2, 4, 8, 16, 32])],
)
def test_numbers_of_tokens(lowbit, requests, wanted):
    assert lowbit.numbers_of_tokens(requests) == wanted


def test_one_copy_of_each_shape_with_its_bias_is_compiled(lowbit):
    other = nn.Linear(3, 3)  # on the target's own weight
    layers = [layer(8, 4, bias=True), layer(4, 8), layer(8, 4, bias=True), layer(8, 4), other]
    silent = layer(6, 4, bias=True, skip_bias_add=True)
    found = lowbit.copies_of_layers(nn.ModuleList([*layers, silent]))
    assert [copy for copy, _ in found] == [one.copy_of_weight for one in (*layers[:2], layers[3], silent)]
    assert [bias is None for _, bias in found] == [False, True, True, True]


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(1, 1, 1), (8, 1, 4), (8, 2, 2), (8, 16, 1), (128, 1, 16)]
)
def test_threads_take_half_of_the_processors_that_the_process_may_use(lowbit, monkeypatch, processors, ranks, threads):
    monkeypatch.setattr(lowbit.os, "sched_getaffinity", lambda _: range(processors))
    assert lowbit._threads(ranks) == threads


def test_all_layers_and_the_logits_are_compiled_and_a_failure_is_a_warning(lowbit, caplog):
    """Compiled by Triton: test_v2_kernels.py."""
    noted, ran, bias = [], [], torch.zeros(50)
    layers = nn.ModuleList([layer(8, 4, noted=noted), layer(4, 8, noted=noted)])
    caplog.set_level(logging.WARNING, logger="vllm.selfspec")
    with lowbit.compiled_beside(layers, (Copy(50, 4, noted), bias), 16, SimpleNamespace(type="cuda"), 2):
        ran.append(len(noted))
    shapes = [((8, 4), None), ((4, 8), None), ((50, 4), bias)]
    assert noted == [(shape, count, own) for shape, own in shapes for count in (1, 2, 4, 8, 16)] and ran == [15]
    noted.clear()
    with lowbit.compiled_beside(None, None, 16, SimpleNamespace(type="cuda"), 2):  # one kernel for a whole draft step
        pass
    with lowbit.compiled_beside(layers, None, 16, torch.device("cpu"), 2):
        pass
    assert noted == []
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "draft kernels: 3 could not be compiled ahead, and will be where they are first launched "
        "(RuntimeError: can't start new thread)"
    )
