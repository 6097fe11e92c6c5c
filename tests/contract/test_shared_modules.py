"""What is made of vLLM's own modules without an engine: the target without adapters, and experts' weights read back."""

import pytest
import torch
from torch import nn

from selfspec_cli.vllm_plugin.weights.experts import _unpacked
from selfspec_cli.vllm_plugin.weights.replace import without_adapters

pytestmark = pytest.mark.contract


class Model(nn.Module):
    """Holds an adapted layer in a list of layers, as a decoder does, and one beside it."""

    def __init__(self, adapted):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(adapted(nn.Linear(4, 4)), nn.LayerNorm(4)), nn.Linear(4, 4)])
        self.logits_processor = adapted(nn.Linear(4, 8))

    def compute_logits(self, x):
        return self.logits_processor(x)


def adapted(base):
    from vllm.lora.layers import BaseLayerWithLoRA

    class Adapted(BaseLayerWithLoRA):
        def __init__(self):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return self.base_layer(x) + 1

    return Adapted()


def test_the_target_without_adapters_shares_every_layer_that_they_wrap():
    model, x = Model(adapted), torch.randn(2, 4)
    before = dict(model.named_modules())
    bare = without_adapters(model)
    assert dict(model.named_modules()) == before
    assert bare.layers[0][0] is model.layers[0][0].base_layer
    assert bare.layers[0][1] is model.layers[0][1] and bare.layers[1] is model.layers[1]
    assert bare.compute_logits(x).equal(model.logits_processor.base_layer(x))
    assert without_adapters(bare) is bare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 128, 64), (3, 64, 96), (1, 1024, 256)])
def test_experts_that_vllm_has_packed_are_read_back_exactly(dtype, shape):
    from vllm import _custom_ops as ops  # loads the operators that are built for this processor

    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("vLLM packs experts in its build for CPUs")
    weight = torch.randn(shape).to(dtype)
    packed = ops.cpu_prepack_moe_weight(weight, "vec")
    assert not packed.equal(weight)
    assert _unpacked(packed, "vec").equal(weight)
