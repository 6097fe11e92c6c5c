"""One token times copies in Marlin's layout, in Triton's interpreter; vLLM's own Python makes the layout. Run as
kernels_interpreted.py is."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers
from selfspec_cli.vllm_plugin.weights import marlin_token
from selfspec_cli.vllm_plugin.weights.one_token import none_arrived


def repacked(copy, bits):
    """As `marlin.repacked`, without a GPU."""
    rows, groups = copy["scales"].shape
    unsigned = (integers(copy, bits).flatten(1) + 2 ** (bits - 1)).t().contiguous()
    words = marlin_weights(unsigned, groups * GROUP, rows, bits, get_weight_perm(bits))
    scales = copy["scales"].t().to(torch.bfloat16).contiguous()
    return words, marlin_permute_scales(scales, groups * GROUP, rows, GROUP)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "at_once", "parts", "biased"),
    [(64, 128, 2, 1, False), (128, 320, 2, 1, True), (192, 640, 4, 3, True), (64, 256, 8, 8, False)],
)
def test_one_token_is_multiplied_as_by_the_copy_itself(bits, rows, columns, at_once, parts, biased):
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=draw) / columns**0.5
    kind = DRAFT_WEIGHTS[f"int{bits}"]
    copy = kind.quantise(weight)
    words, scales = repacked(copy, bits)
    bias = torch.randn(rows, generator=draw).bfloat16() if biased else None
    asked = {"at_once": at_once, "parts": parts, "asm": False, "early": False}
    dense = kind.dequantise(copy | {"scales": copy["scales"].bfloat16()}, torch.float32)

    # Whole numbers of which the largest of each group is 127 are rounded to themselves: then only bf16 rounds.
    whole = torch.randint(-127, 128, (1, columns), generator=draw).bfloat16()
    whole[:, ::GROUP] = 127
    exact = marlin_token.product(whole, words, scales, bias, **asked)
    wanted = whole.float() @ dense.T + (0 if bias is None else bias.float())
    torch.testing.assert_close(exact.float(), wanted.bfloat16().float(), rtol=2**-7, atol=1e-3)

    x = torch.randn(1, columns, generator=draw).bfloat16()
    x[:, 64:128] = 0  # a group without a largest value
    got = marlin_token.product(x, words, scales, bias, **asked)
    wanted = x.float() @ dense.T + (0 if bias is None else bias.float())
    assert float((got.float() - wanted).norm() / wanted.norm()) < 0.02
    assert not none_arrived(x.device).any()  # as it was found
