"""Integer copies: how integers are packed, and what the choice of a scale is worth."""

import pytest
import torch

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP, Integers, _packed, _unpacked
from selfspec_cli.early_exit.errors import SettingsError

WIDTHS = (4, 5, 6, 8)
INTEGERS = [DRAFT_WEIGHTS[f"int{width}"] for width in WIDTHS]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_integer_comes_back_from_its_place(width):
    top = 2 ** (width - 1)
    q = torch.randint(-top, top, (6, 3, GROUP), dtype=torch.int32, generator=torch.Generator().manual_seed(width))
    q[0, 0, :2] = torch.tensor([-top, top - 1])
    assert _unpacked(_packed(q, width), width).equal(q)


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_a_copy_takes_the_bits_that_it_says(kind):
    weight = torch.randn(32, 4 * GROUP)
    stored = sum(tensor.numel() * tensor.element_size() * 8 for tensor in kind.quantise(weight).values())
    assert stored == kind.bits * weight.numel()


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_rounding_is_no_worse_than_with_the_plain_scale(kind: Integers):
    weight = torch.randn(16, 8 * GROUP, generator=torch.Generator().manual_seed(1))
    groups, top = weight.unflatten(1, (-1, GROUP)), 2 ** (kind.width - 1)
    scale = groups.abs().amax(2, keepdim=True) / (top - 1)
    plain = ((groups / scale).round() * scale - groups).square().sum()
    chosen = (kind.dequantise(kind.quantise(weight), torch.float32) - weight).square().sum()
    assert chosen < 1.001 * plain  # scales are stored as halves


def test_groups_of_zeros_and_of_tiny_values_stay_finite():
    weight = torch.zeros(2, 2 * GROUP)
    weight[1, :GROUP] = 1e-12
    for kind in INTEGERS:
        restored = kind.dequantise(kind.quantise(weight), torch.float32)
        assert restored.abs().max() <= 1e-12


def test_rows_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(SettingsError, match="'int4' is not supported here: a weight has rows of 96 values"):
        DRAFT_WEIGHTS["int4"].quantise(torch.randn(4, 96))


def test_on_cuda_the_target_has_to_run_in_bfloat16():
    require_draft_weights("int4", WeightFacts("cpu", dtype="float32"))
    require_draft_weights("int4", WeightFacts("cuda", dtype="bfloat16"))
    with pytest.raises(SettingsError, match=r"bfloat16, not float16.*allowed: shared"):
        require_draft_weights("int4", WeightFacts("cuda", dtype="float16"))
