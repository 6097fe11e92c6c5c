"""The candidates of experiments/kernels in Triton's interpreter: one token times several rows of an integer copy, and
few tokens. Run as kernels_interpreted.py is, with that folder on the path."""

from __future__ import annotations

import few_tokens
import pytest
import several_rows
import torch

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.vllm_plugin.weights.one_token import none_arrived

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(DEVICE)
GPU = DEVICE == "cuda"

ASKED = [  # each with a shape of its own
    ((64, 256), {"rows_at_once": 16, "parts": 1, "stages": 1, "warps": 4}),
    ((40, 320), {"rows_at_once": 16, "parts": 1, "stages": 2, "warps": 2}),  # a tile and a step that stick out
    ((72, 704), {"rows_at_once": 32, "parts": 3, "stages": 2, "warps": 2}),  # parts that differ
    ((130, 448), {"rows_at_once": 64, "parts": 2, "stages": 3, "warps": 4}),  # warps with other rows
    ((70, 128), {"rows_at_once": 128, "parts": 1, "stages": 1, "warps": 4}),  # no warps that share rows
    ((48, 64), {}),
]


def product_and_wanted(bits, shape, tokens, dtype, asked, whole):
    """Of random tokens and weights, and a bias where their number is odd; whole: of integers that 8 bits hold."""
    rows, columns = shape
    draw = torch.Generator(DEVICE).manual_seed(rows + tokens)
    kind = DRAFT_WEIGHTS[f"int{bits}"]
    copy = kind.quantise(torch.randn(rows, columns, generator=draw) / columns**0.5)
    x = torch.randn(tokens, columns, generator=draw)
    if whole:
        x = x.mul(60).round().clamp(-127, 127)
        x[:, ::GROUP] = -127
    x[tokens // 2, -GROUP:] = 0  # a group without a largest value
    bias = torch.randn(rows, generator=draw).to(dtype) if tokens % 2 else None
    x = x.to(dtype)
    got = few_tokens.product(x, copy["words"], copy["scales"], bias, asm=GPU, **asked)
    assert (got.dtype, got.shape) == (dtype, (tokens, rows))
    assert not none_arrived(x.device).any()  # as it was found
    return got.double(), x.double() @ kind.dequantise(copy, torch.float64).T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 19, 64])
@pytest.mark.parametrize(("shape", "asked"), ASKED)
def test_few_tokens_are_multiplied_as_by_the_copy_itself(bits, shape, tokens, asked, itself):
    asked = {**asked, "itself": itself}
    got, wanted = product_and_wanted(bits, shape, tokens, torch.bfloat16, asked, whole=False)
    assert (got - wanted).norm() / wanted.norm() < 0.015  # tokens are rounded to 8 bits, products to bf16
    assert (got - wanted).abs().max() < 0.1 * wanted.square().mean().sqrt()  # no single one is wrong


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 33])
@pytest.mark.parametrize(("shape", "asked"), ASKED)
def test_tokens_that_8_bits_hold_are_multiplied_exactly(bits, shape, tokens, asked, itself):
    # In float32, which the kernels do not keep from reading tokens in, nothing is rounded.
    asked = {**asked, "itself": itself}
    got, wanted = product_and_wanted(bits, shape, tokens, torch.float32, asked, whole=True)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", range(1, 65))
@pytest.mark.parametrize(("rows", "groups"), [(2304, 36), (12288, 36), (2304, 96), (128256, 64), (100, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_usual_settings_are_possible(rows, groups, bits, tokens):
    usual = few_tokens.usual_settings(rows, groups, bits, tokens)
    assert {number.bit_count() for number in (usual.rows_at_once, usual.warps)} == {1}
    assert usual.rows_at_once >= 16 and usual.warps * few_tokens.ROWS_OF_WARP >= usual.rows_at_once
    assert 1 <= usual.parts <= groups and 1 <= usual.stages <= groups


@pytest.mark.parametrize("tokens", [0, 65])
def test_other_numbers_of_tokens_are_refused(tokens):
    words, scales = torch.zeros(16, 16, dtype=torch.int32), torch.ones(16, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"{tokens} tokens, not 1 to 64"):
        few_tokens.product(torch.zeros(tokens, 64, dtype=torch.bfloat16), words, scales)


def test_other_copies_are_refused():
    words, scales = torch.zeros(16, 12, dtype=torch.int32), torch.ones(16, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match="no copy of 4 or 8 bits"):
        few_tokens.product(torch.zeros(2, 64, dtype=torch.bfloat16), words, scales)


# ---- one token times several rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int5", "int6", "int8"])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize(("columns", "at_once"), [(192, 4), (256, 4), (256, 2), (448, 2)])  # steps: a part, whole
@pytest.mark.parametrize("rows_at_once", [1, 2, 4])  # of five
def test_one_token_times_several_rows(name, columns, at_once, rows_at_once, itself):
    kind = DRAFT_WEIGHTS[name]
    copy = kind.quantise(torch.randn(5, columns))
    x, bias = torch.randn(1, columns), torch.randn(5)
    parts = copy["words"], copy.get("more"), copy["scales"]
    asked = {"rows_at_once": rows_at_once, "at_once": at_once, "itself": itself, "asm": GPU}
    got = several_rows.product(x, *parts, bias, **asked)
    want = x.double() @ kind.dequantise(copy, torch.float64).T + bias
    assert (got - want).norm() / (want - bias).norm() < 0.015  # tokens are rounded to 8 bits
    whole = x.round().clamp(-1, 1) * 127  # 8 bits hold these tokens exactly
    exact = several_rows.product(whole, *parts, **asked)
    want = whole.double() @ kind.dequantise(copy, torch.float64).T
    assert (exact - want).norm() / want.norm() < 1e-5
