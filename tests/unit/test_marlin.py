"""Copies as Marlin reads them, and when it does, as far as no GPU is needed: its kernels are vLLM's."""

import pytest
import torch
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers

lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit", reason="Triton or vLLM is not installed")
rounding = lowbit.rounding


@pytest.mark.parametrize("bits", [4, 8])
def test_a_copy_along_columns_holds_the_same_integers(bits, monkeypatch):
    monkeypatch.setattr(lowbit, "ROWS", 48)  # more than one part, the last one short
    copy = DRAFT_WEIGHTS[f"int{bits}"].quantise(torch.randn(64, 2 * GROUP))
    words = lowbit.along_columns(copy, bits)
    assert words.dtype is torch.int32
    assert words.shape == (2 * GROUP * bits // 32, 64)
    columns = torch.arange(2 * GROUP)
    per_word = 32 // bits
    fields = (words[columns // per_word] >> (bits * (columns % per_word)).unsqueeze(1)) & (2**bits - 1)
    assert (fields - 2 ** (bits - 1)).t().equal(integers(copy, bits).flatten(1))


@pytest.mark.parametrize(
    ("bits", "rows", "columns", "served"),
    [(4, 64, 128, True), (8, 128, 64, True), (4, 64, 64, False), (8, 96, 128, False), (5, 64, 128, False)],
)
def test_shapes_that_would_have_to_be_padded_are_not_served(bits, rows, columns, served):
    assert lowbit.marlin_serves(bits, rows, columns) is served


def in_two_layouts(monkeypatch, rows=64):
    """A copy that engines for many requests keep, where Marlin is a stand-in that says how many tokens it was given."""
    asked = []
    monkeypatch.setattr(lowbit, "_many_requests_at_a_time", lambda: True)
    monkeypatch.setattr(lowbit, "none_arrived", lambda device: None)
    monkeypatch.setattr(lowbit, "repacked", lambda copy, bits: (copy["words"].clone(), copy["scales"].clone()))
    monkeypatch.setattr(lowbit, "marlin_product", lambda x, *copy: asked.append(len(x)) or x.new_zeros(len(x), rows))
    weight = torch.randn(rows, 2 * GROUP)
    return asked, weight, lowbit.prepare(DRAFT_WEIGHTS["int4"].quantise(weight))


def test_an_engine_for_many_requests_keeps_the_first_layout_and_marlins(monkeypatch):
    _, weight, copy = in_two_layouts(monkeypatch)
    assert set(copy) == {"words", "scales", *lowbit.SECOND_LAYOUT}
    monkeypatch.setattr(lowbit, "_many_requests_at_a_time", lambda: False)
    assert set(lowbit.prepare(DRAFT_WEIGHTS["int4"].quantise(weight))) == {"words", "scales"}
    monkeypatch.setattr(lowbit, "_many_requests_at_a_time", lambda: True)
    assert set(lowbit.prepare(DRAFT_WEIGHTS["int4"].quantise(weight[:, :GROUP]))) == {"words", "scales"}


def test_how_many_tokens_a_step_has_chooses_the_kernel_when_it_runs(monkeypatch):
    asked, weight, copy = in_two_layouts(monkeypatch)
    few = []
    monkeypatch.setattr(lowbit, "_product", lambda tokens, *others: few.append(tokens) or torch.ones(tokens, 64))
    monkeypatch.setattr(lowbit.rounding, "round_tokens", lambda x, bits: (x, x))
    for tokens in (1, 8, rounding.MOST):
        assert lowbit.linear(torch.randn(tokens, 128), copy, None, weight).all()
    for tokens in (rounding.MOST + 1, lowbit.MOST_OF_MARLIN):
        assert not lowbit.linear(torch.randn(tokens, 128), copy, None, weight).any()
    assert (few, asked) == ([1, 8, 32], [33, 64])
    one_layout = {name: tensor for name, tensor in copy.items() if name not in lowbit.SECOND_LAYOUT}
    x = torch.randn(33, 128)
    assert lowbit.linear(x, one_layout, None, weight).equal(F.linear(x, weight))
    assert (few[-1], asked[-1]) == (32, 64)


@pytest.mark.parametrize("tokens", [32, 33])
def test_what_marlin_takes_is_not_compiled_ahead(tokens, monkeypatch):
    _, _, copy = in_two_layouts(monkeypatch)
    made = []
    monkeypatch.setattr(lowbit, "_product", lambda tokens, *others, **more: made.append(tokens))
    lowbit.compile_for(tokens, copy, None, torch.bfloat16)
    assert made == ([32] if tokens == 32 else [])


def test_more_tokens_than_marlin_pays_for_are_multiplied_by_the_targets_own_weight(monkeypatch):
    asked, weight, copy = in_two_layouts(monkeypatch)
    x = torch.randn(lowbit.MOST_OF_MARLIN + 1, 128)
    assert lowbit.linear(x, copy, None, weight).equal(F.linear(x, weight))
    assert asked == []
    assert not lowbit.linear(x, copy, None, None).any()  # the target holds its weight in another form
    assert asked == [65]
