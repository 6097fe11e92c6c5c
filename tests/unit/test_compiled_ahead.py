"""Which products are compiled before a draft step needs them, and that one that cannot be compiled ends nothing."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from selfspec_cli.vllm_plugin.weights import compiled_ahead
from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear

CPU = torch.device("cpu")


class Copy(nn.Module):
    """A copy of so many rows and columns."""

    def __init__(self, rows, columns):
        super().__init__()
        self.words = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)


def layer(rows, columns, bias=False, **more):
    made = nn.Module()
    made.quant_method, made.copy_of_weight = CopiedLinear(), Copy(rows, columns)
    made.bias = torch.zeros(rows) if bias else None
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("requests", "above", "wanted"),
    [(1, 0, [1]), (2, 0, [1, 4]), (5, 0, [1, 4, 8]), (32, 0, [1, 4, 8, 16, 32]), (256, 0, [1, 4, 8, 16, 32]),
     (4, 4, []), (32, 4, [8, 16, 32])],
)  # fmt: skip
def test_numbers_of_tokens(requests, above, wanted):
    assert compiled_ahead.numbers_of_tokens(requests, above) == wanted


def test_one_copy_of_each_shape_with_its_bias_is_compiled():
    other = nn.Linear(3, 3)  # on the target's own weight
    layers = [layer(8, 4, bias=True), layer(4, 8), layer(8, 4, bias=True), layer(8, 4), other]
    silent = layer(6, 4, bias=True, skip_bias_add=True)
    found = compiled_ahead.of_layers(nn.ModuleList([*layers, silent]))
    assert [copy for copy, _ in found] == [one.copy_of_weight for one in (*layers[:2], layers[3], silent)]
    assert [bias is None for _, bias in found] == [False, True, True, True]


def test_nothing_is_compiled_without_a_gpu():
    assert compiled_ahead.begin(nn.ModuleList([layer(8, 4)]), None, 32, 0, CPU, 1) == []


def test_all_layers_and_the_logits_are_compiled_in_threads_and_a_failure_ends_nothing(monkeypatch):
    seen = []

    def compiled(copy, bias, tokens, device):
        seen.append((tuple(copy.words.shape), tokens))
        if tokens == 8:
            raise RuntimeError("out of registers")

    projection = SimpleNamespace(copy=Copy(50, 4), bias=None)
    monkeypatch.setattr(compiled_ahead, "_compiled", compiled)
    monkeypatch.setattr(compiled_ahead, "CopiedProjection", SimpleNamespace)
    cuda = SimpleNamespace(type="cuda")
    futures = compiled_ahead.begin(nn.ModuleList([layer(8, 4), layer(4, 8)]), projection, 16, 4, cuda, 2)
    compiled_ahead.finish(futures)
    of_layers = {(shape, count) for shape in ((8, 4), (4, 8)) for count in (8, 16)}
    assert set(seen) == of_layers | {((50, 4), count) for count in (1, 4, 8, 16)} and len(seen) == 8
    assert all(future.done() for future in futures) and sum(future.exception() is not None for future in futures) == 3


def test_waiting_is_for_all():
    first, second = Future(), Future()
    first.set_result(None)
    second.set_exception(RuntimeError("no PTX"))
    compiled_ahead.finish([first, second])
