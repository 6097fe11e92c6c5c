"""Which products are compiled before a draft step needs them, and that one that cannot be compiled ends nothing."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear

lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit", reason="Triton is not installed")
CPU = torch.device("cpu")


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
def test_numbers_of_tokens(requests, wanted):
    assert lowbit.numbers_of_tokens(requests) == wanted


def test_one_copy_of_each_shape_with_its_bias_is_compiled():
    other = nn.Linear(3, 3)  # on the target's own weight
    layers = [layer(8, 4, bias=True), layer(4, 8), layer(8, 4, bias=True), layer(8, 4), other]
    silent = layer(6, 4, bias=True, skip_bias_add=True)
    found = lowbit.copies_of_layers(nn.ModuleList([*layers, silent]))
    assert [copy for copy, _ in found] == [one.copy_of_weight for one in (*layers[:2], layers[3], silent)]
    assert [bias is None for _, bias in found] == [False, True, True, True]


def test_nothing_is_compiled_without_a_gpu():
    noted = []
    with lowbit.compiled_beside(nn.ModuleList([layer(8, 4, noted=noted)]), None, 32, CPU, 1):
        pass
    assert noted == []


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(1, 1, 1), (8, 1, 4), (8, 2, 2), (8, 16, 1), (128, 1, 16)]
)
def test_threads_take_half_of_the_processors_that_the_process_may_use(monkeypatch, processors, ranks, threads):
    monkeypatch.setattr(lowbit.os, "sched_getaffinity", lambda _: range(processors))
    assert lowbit._threads(ranks) == threads


def test_all_layers_and_the_logits_are_compiled_and_a_failure_is_a_warning(caplog):
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
    assert noted == []
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "draft kernels: 3 could not be compiled ahead, and will be where they are first launched "
        "(RuntimeError: can't start new thread)"
    )
