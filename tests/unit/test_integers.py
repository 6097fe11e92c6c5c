"""Integer copies: how integers are packed, and what the choice of a scale is worth."""

import pytest
import torch

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP, Integers
from selfspec_cli.early_exit.errors import SettingsError

WIDTHS = (4, 8)
INTEGERS = [DRAFT_WEIGHTS[f"int{width}"] for width in WIDTHS]


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_a_copy_takes_the_bits_that_it_says(kind):
    weight = torch.randn(32, 4 * GROUP)
    stored = sum(tensor.numel() * tensor.element_size() * 8 for tensor in kind.quantise(weight).values())
    assert stored == kind.bits * weight.numel()
    assert kind.kernels == "selfspec_cli.vllm_plugin.weights.lowbit" and DRAFT_WEIGHTS["fp8"].bits == 8


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_of_five_scales_each_group_gets_the_best(kind: Integers):
    groups = torch.randn(64, 4, GROUP, generator=torch.Generator().manual_seed(2))
    top, largest = 2 ** (kind.width - 1), groups.abs().amax(2, keepdim=True)
    extreme = torch.where(groups.amax(2, keepdim=True) == largest, largest, -largest)
    tried = [extreme / -top, *(largest / (top - 1) * closer for closer in (1.0, 0.95, 0.9, 0.85))]
    halves = [scale.half().float() for scale in tried]
    errors = [((groups / one).round().clamp(-top, top - 1) * one - groups).square().sum(2) for one in halves]
    restored = kind.dequantise(kind.quantise(groups.flatten(1)), torch.float32).view_as(groups)
    assert torch.allclose((restored - groups).square().sum(2), torch.stack(errors).amin(0), rtol=1e-4)


def test_a_fit_minds_what_the_data_do():
    """Inputs that do not depend on each other, some a hundred times as large: only the choice of scales can differ."""
    weight = torch.randn(32, 2 * GROUP, generator=torch.Generator().manual_seed(4))
    sizes = torch.ones(2 * GROUP)
    sizes[::8] = 1e4
    kind = DRAFT_WEIGHTS["int4"]
    fitted, rounded = (
        float(((kind.dequantise(copy, torch.float32) - weight).square() * sizes).sum())
        for copy in (kind.fit(weight, torch.diag(sizes)), kind.quantise(weight))
    )
    assert fitted < 0.99 * rounded


@pytest.mark.parametrize("broken", [torch.randn(4, 96), torch.full((4, GROUP), torch.nan)])
def test_a_fit_refuses_what_rounding_does(broken):
    messages = []
    for make in (DRAFT_WEIGHTS["int4"].quantise, lambda one: DRAFT_WEIGHTS["int4"].fit(one, torch.eye(one.shape[1]))):
        with pytest.raises(SettingsError) as error:
            make(broken)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_on_cuda_the_target_has_to_run_in_bfloat16():
    require_draft_weights("int4", WeightFacts("cpu", dtype="float32"))
    require_draft_weights("int4", WeightFacts("cuda", dtype="bfloat16"))
    with pytest.raises(SettingsError, match=r"bfloat16, not float16.*allowed: shared"):
        require_draft_weights("int4", WeightFacts("cuda", dtype="float16"))


@pytest.mark.parametrize("kind", [DRAFT_WEIGHTS["int4"], DRAFT_WEIGHTS["int8"]], ids=lambda kind: kind.name)
def test_copies_of_experts_are_bytes_that_vllms_kernels_read(kind):
    """As `fused_moe_kernel_gptq_awq` reads them: from a byte, or half of one, minus the middle, times the scale."""
    lowbit = pytest.importorskip("selfspec_cli.vllm_plugin.weights.lowbit")  # imports Triton
    weight = torch.randn(3, 32, 2 * GROUP)
    copy = kind.quantise(weight.flatten(0, 1))
    copies = {name: tensor.view(3, 32, -1) for name, tensor in copy.items()}
    bits = kind.width
    stored = lowbit.as_bytes(copies)
    assert stored.dtype is torch.uint8
    columns = torch.arange(2 * GROUP)
    halves = (stored[:, :, columns // 2].int() >> (columns % 2 * 4)) & 15 if bits == 4 else None
    values = stored.int() if halves is None else halves
    scales = copies["scales"].float()[:, :, columns // GROUP]
    read = (values - 2 ** (bits - 1)) * scales
    assert read.flatten(0, 1).equal(kind.dequantise(copy, torch.float32))
