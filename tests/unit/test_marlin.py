"""Copies as Marlin reads them, as far as no GPU is needed: its repacking and its products are vLLM's."""

import pytest
import torch
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers

marlin = pytest.importorskip("selfspec_cli.vllm_plugin.weights.marlin", reason="vLLM is not installed")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_copy_along_columns_holds_the_same_integers(bits, monkeypatch):
    monkeypatch.setattr(marlin, "ROWS", 48)  # more than one part, the last one short
    copy = DRAFT_WEIGHTS[f"int{bits}"].quantise(torch.randn(64, 2 * GROUP))
    words = marlin.along_columns(copy, bits)
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
    assert marlin.serves(bits, rows, columns) is served


def test_more_tokens_than_pay_are_multiplied_by_the_targets_own_weight(monkeypatch):
    seen = []
    monkeypatch.setattr(marlin, "product", lambda x, *copy: seen.append(len(x)) or x.new_zeros(len(x), 64))
    weight, tensors = torch.randn(64, 128), {"marlin": torch.zeros(8, 128).int(), "scales": torch.zeros(2, 64)}
    assert not marlin.linear(torch.randn(marlin.MOST, 128), tensors, None, weight).any()
    x = torch.randn(marlin.MOST + 1, 128)
    assert marlin.linear(x, tensors, None, weight).equal(F.linear(x, weight))
    assert seen == [marlin.MOST]
