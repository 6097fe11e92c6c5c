"""Integer copies: how integers are packed, and what the choice of a scale is worth."""

import pytest
import torch

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP, Integers, _packed, integers
from selfspec_cli.early_exit.errors import SettingsError

WIDTHS = (4, 5, 6, 8)
INTEGERS = [DRAFT_WEIGHTS[f"int{width}"] for width in WIDTHS]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_integer_comes_back_from_its_place(width):
    top = 2 ** (width - 1)
    q = torch.randint(-top, top, (6, 3, GROUP), dtype=torch.int32, generator=torch.Generator().manual_seed(width))
    q[0, 0, :2] = torch.tensor([-top, top - 1])
    assert integers(_packed(q, width), width).equal(q)


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


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_copies_of_experts_are_bytes_that_vllms_kernels_read(kind):
    """As `fused_moe_kernel_gptq_awq` reads them: from a byte, or half of one, minus the middle, times the scale."""
    lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit")  # imports Triton
    weight = torch.randn(3, 32, 2 * GROUP)
    copy = kind.quantise(weight.flatten(0, 1))
    copies = {name: tensor.view(3, 32, -1) for name, tensor in copy.items()}
    bits = 4 if kind.width == 4 else 8
    stored = lowbit.as_bytes(copies, bits)
    assert stored.dtype is torch.uint8
    columns = torch.arange(2 * GROUP)
    halves = (stored[:, :, columns // 2].int() >> (columns % 2 * 4)) & 15 if bits == 4 else None
    values = stored.int() if halves is None else halves
    scales = copies["scales"].float()[:, :, columns // GROUP]
    read = (values - 2 ** (bits - 1)) * scales
    assert read.flatten(0, 1).equal(kind.dequantise(copy, torch.float32))
