"""The draft on 8-bit copies inside a live engine: the copies draft, the target's layers stay its own, and torch.compile
keeps the two apart. The kernels need CUDA, so PyTorch multiplies here, and fp32 stands in for bf16; tests/gpu runs the
kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import layer_skip, live
from models import LAYERS
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.settings import DraftSettings
from selfspec_cli.vllm_plugin import spec_config, trunk
from selfspec_cli.vllm_plugin.weights import fp8 as fp8_copies
from selfspec_cli.vllm_plugin.weights import linear
from selfspec_cli.vllm_plugin.weights.fp8 import CopiedWeight
from selfspec_cli.vllm_plugin.weights.replace import shallow

pytestmark = pytest.mark.engine

EXIT, K, SOME = LAYERS // 2, 3, range(0, 32, 4)
COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}


class Copy(nn.Module):
    """A copy that PyTorch multiplies by."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        copy, scale = fp8_copies.quantise(weight)
        self.weight, self.weight_scale = (nn.Parameter(part, requires_grad=False) for part in (copy, scale))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.weight_scale)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Copies without CUDA; yields what the proposer made of the target, under "target" and "trunk"."""
    from vllm.model_executor.layers import utils

    from selfspec_cli.vllm_plugin.v1 import proposer as v1_proposer

    made: dict[str, Any] = {"draft_weights": "fp8"}

    def first_layers(decoder: nn.Module, layers: int, config: Any) -> nn.Module:
        before = {name: id(part) for name, part in decoder.named_modules()}
        made.update(target=decoder, trunk=trunk.first_layers(decoder, layers, config, made["draft_weights"]))
        assert {name: id(part) for name, part in decoder.named_modules()} == before
        return made["trunk"]

    def settings_of(config: Any) -> DraftSettings | None:
        found = spec_config.settings_of(config)
        return found and replace(found, draft_weights=made["draft_weights"])

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear  # vLLM would pack the weight for oneDNN and leave none to copy

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weight)
    monkeypatch.setattr(v1_proposer, "first_layers", first_layers)
    monkeypatch.setattr(v1_proposer, "settings_of", settings_of)
    monkeypatch.setattr(fp8_copies, "CopiedWeight", Copy)
    monkeypatch.setattr(fp8_copies, "PLAIN", torch.float32)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_draft_and_the_output_is_the_targets(expected, on_the_cpu, name, compiled):
    want = expected(name)
    with live(want.path, layer_skip(EXIT, K), **(COMPILED if compiled else {})) as engine:
        want.check(engine, SOME)
        engine.counts().require_both_verdicts()
        weights, step = engine.call("early_exit_weights"), engine.call("early_exit_step_bytes")
    made, target = on_the_cpu["trunk"], on_the_cpu["target"]
    assert len(made.layers) == len(target.layers) == LAYERS
    assert all(made.layers[i] is target.layers[i] for i in range(EXIT, LAYERS))
    for copied, own in zip(made.layers[:EXIT], target.layers, strict=False):
        assert copied.self_attn.attn is own.self_attn.attn  # the KV cache
        assert copied.mlp.gate_up_proj.quant_method is not own.mlp.gate_up_proj.quant_method
        assert own.mlp.gate_up_proj.weight.dtype is torch.float32
    share = step["draft"] / (step["full"] * EXIT / LAYERS)
    assert 0.25 < share < 0.45, step  # a byte for four, scales, norms, and the whole head
    assert 0.2 * step["draft"] < weights["draft"] <= step["draft"]


class Spoiled(Copy):
    """What no copy should be: the opposite of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_however_wrong_the_copies_are_the_output_is_the_targets(expected, on_the_cpu, monkeypatch, compiled):
    """Also the proof that a compiled draft runs the copies, and that verifying overwrites the keys they left behind."""
    monkeypatch.setattr(fp8_copies, "CopiedWeight", Spoiled)
    want = expected("llama")
    with live(want.path, layer_skip(EXIT, K), **(COMPILED if compiled else {})) as engine:
        want.check(engine, SOME)
        made = engine.counts()
    assert made.accepted < made.drafted / 10, made


@pytest.mark.parametrize("compiled", [False, True])
def test_one_token_and_more_have_products_of_their_own(expected, on_the_cpu, monkeypatch, compiled):
    """The products for one token are wrong here, so a request alone has no draft accepted, and requests together do."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.float() * scale)

    monkeypatch.setattr(fp8_copies, "CopiedWeight", CopiedWeight)
    monkeypatch.setattr(fp8_copies, "_tokens", product)
    monkeypatch.setattr(fp8_copies, "_one_token", lambda *args: -product(*args))
    want = expected("llama")
    with live(want.path, layer_skip(EXIT, K), **(COMPILED if compiled else {})) as engine:
        want.check(engine, [0])
        alone = engine.counts()
        want.check(engine, SOME)
        together = engine.counts() - alone
    assert alone.accepted < alone.drafted / 10, alone
    assert together.accepted > together.drafted / 5, together


def test_the_operators_of_a_shared_trunk_in_a_compiled_engine(expected, on_the_cpu, monkeypatch):
    """What CUDA runs (linear.py), here on the target's own weights with PyTorch's kernel inside."""
    from vllm.model_executor.layers.linear import LinearBase

    def twin(module: nn.Module, name: str) -> nn.Module | None:
        return shallow(module, quant_method=linear.SharedLinear()) if isinstance(module, LinearBase) else None

    on_the_cpu["draft_weights"] = "shared"
    monkeypatch.setattr(linear, "linear", torch.ops.selfspec.linear)  # on the CPU it would leave the operator out
    monkeypatch.setitem(trunk.TWIN, "shared", twin)
    want = expected("qwen3")
    with live(want.path, layer_skip(EXIT, K), **COMPILED) as engine:
        want.check(engine, SOME)
        engine.counts().require_both_verdicts()
        step = engine.call("early_exit_step_bytes")
    made, target = on_the_cpu["trunk"], on_the_cpu["target"]
    for twins, own in zip(made.layers[:EXIT], target.layers, strict=False):
        assert twins.mlp.down_proj.weight is own.mlp.down_proj.weight
        assert isinstance(twins.mlp.down_proj.quant_method, linear.SharedLinear)
        assert not isinstance(own.mlp.down_proj.quant_method, linear.SharedLinear)
    assert 0.9 < step["draft"] / (step["full"] * EXIT / LAYERS) < 2  # the head is whole


def test_without_cuda_copies_are_refused_at_start(expected):
    message = "draft_weights 'fp8' is not supported here: the kernels need CUDA"
    spec = layer_skip(EXIT, K, draft_weights="fp8")
    with pytest.raises(SettingsError, match=message), live(expected("llama").path, spec):
        pass
