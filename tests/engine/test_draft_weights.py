"""The draft on copies of weights inside a live engine: the copies draft, the target's layers stay its own, and
torch.compile keeps the two apart. On the CPU copies are dequantised and PyTorch multiplies; where a test stands in for
the kernels of CUDA it says so, and tests/gpu runs those."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import layer_skip, live
from models import LAYERS
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.fp8 import E4m3
from selfspec_cli.vllm_plugin import trunk
from selfspec_cli.vllm_plugin.decoder import decoder_of
from selfspec_cli.vllm_plugin.v1 import proposer as v1_proposer
from selfspec_cli.vllm_plugin.weights import copied as copied_weights
from selfspec_cli.vllm_plugin.weights import fp8 as fp8_kernels
from selfspec_cli.vllm_plugin.weights import shared
from selfspec_cli.vllm_plugin.weights.shared import shallow_copy

EXIT, K, SOME = LAYERS // 2, 3, range(0, 32, 4)
COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}
FP8 = layer_skip(EXIT, K, draft_weights="fp8")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The target's decoder and what the proposer made of it, under "target" and "trunk"."""
    found: dict[str, Any] = {}

    def first_layers(model: nn.Module, *args: Any) -> nn.Module:
        before = {name: id(part) for name, part in model.named_modules()}
        view = trunk.first_layers(model, *args)
        found.update(target=decoder_of(model), trunk=view.drafting_decoder)
        assert {name: id(part) for name, part in model.named_modules()} == before
        return view

    monkeypatch.setattr(v1_proposer, "first_layers", first_layers)
    return found


def copies_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The linear layers among some layers that multiply with copies."""
    return [part for layer in layers for part in layer.modules() if isinstance(part, copied_weights.CopiedWeight)]


@torch.no_grad()
def spoil(copies: Iterable[nn.Module], by: Callable[[Tensor], Any]) -> None:
    """Change the weights of modules that draft, in place, while their engine lives."""
    for weight in {id(weight): weight for module in copies for weight in module.parameters()}.values():
        by(weight)


def test_copies_draft_and_however_wrong_they_are_the_output_is_the_targets(expected, made):
    """Wrong copies are also the proof that verifying overwrites the keys and values they left behind. The experts and
    the products of one token are what tells compiled copies apart."""
    want = expected("llama")
    with live(want.path, FP8) as engine:
        want.check(engine, SOME).require_both_verdicts()
        draft, target = made["trunk"], made["target"]
        assert len(draft.layers) == len(target.layers) == LAYERS
        assert all(draft.layers[i] is target.layers[i] for i in range(EXIT, LAYERS))
        weights, copies = load_file(want.path / "model.safetensors"), copies_of(draft.layers[:EXIT])
        for place, (copied, own) in enumerate(zip(draft.layers[:EXIT], target.layers, strict=False)):
            assert copied.self_attn.attn is own.self_attn.attn  # the KV cache
            assert copied.mlp.down_proj.quant_method is not own.mlp.down_proj.quant_method
            # Exactly the copy of the weight on disk, though vLLM's CPU build keeps a packed one only.
            wanted = weights[f"model.layers.{place}.mlp.down_proj.weight"]
            wanted = E4m3().dequantise(E4m3().quantise(wanted), wanted.dtype)
            assert copied.mlp.down_proj.copy_of_weight.weight.equal(wanted)
        assert len(copies) == 4 * EXIT
        spoil(copies, Tensor.neg_)
        counts = want.check(engine, SOME)
        assert counts.accepted < counts.drafted / 10, counts
        spoil(copies, Tensor.neg_)
        want.check(engine, SOME).require_both_verdicts()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_token_and_more_have_products_of_their_own(expected, monkeypatch, compiled):
    """With the operators of CUDA, and PyTorch inside. The products for one token are wrong here, so a request alone has
    no draft accepted, and requests together do."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.float() * scale)

    for module in (copied_weights, trunk):
        monkeypatch.setattr(module, "kernels_of", lambda kind, device: fp8_kernels)
    monkeypatch.setattr(fp8_kernels, "_tokens", product)
    monkeypatch.setattr(fp8_kernels, "_one_token", lambda *args: -product(*args))
    want = expected("llama")
    with live(want.path, FP8, **(COMPILED if compiled else {})) as engine:
        alone, together = want.check(engine, [0]), want.check(engine, SOME)
        weights, step = engine.call("early_exit_weights"), engine.call("early_exit_step_bytes")
    assert alone.accepted < alone.drafted / 10, alone
    assert together.accepted > together.drafted / 5, together
    share = step["draft"] / (step["full"] * EXIT / LAYERS)
    assert 0.25 < share < 0.45, step  # a byte for four, scales, norms, and the whole head
    assert 0.2 * step["draft"] < weights["draft"] <= step["draft"]


def test_the_operators_of_a_shared_trunk_in_a_compiled_engine(expected, made, monkeypatch):
    """What CUDA runs (shared.py), here on the target's own weights with PyTorch's kernel inside."""

    def on_own_weight(module: nn.Module, name: str) -> nn.Module | None:
        return shallow_copy(module, quant_method=shared.SharedLinear()) if isinstance(module, LinearBase) else None

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear  # vLLM would pack the weight for oneDNN and leave none to share

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weight)
    monkeypatch.setattr(shared, "linear", torch.ops.selfspec.linear)  # on the CPU it would leave the operator out
    monkeypatch.setattr(trunk, "on_own_weight", on_own_weight)
    monkeypatch.setattr(trunk, "multiplies_with_pytorch", lambda config: True)
    want = expected("qwen3")
    with live(want.path, layer_skip(EXIT, K), **COMPILED) as engine:
        want.check(engine, SOME).require_both_verdicts()
        step = engine.call("early_exit_step_bytes")
    for draft, own in zip(made["trunk"].layers[:EXIT], made["target"].layers, strict=False):
        assert draft.mlp.down_proj.weight is own.mlp.down_proj.weight
        assert isinstance(draft.mlp.down_proj.quant_method, shared.SharedLinear)
        assert not isinstance(own.mlp.down_proj.quant_method, shared.SharedLinear)
    assert 0.9 < step["draft"] / (step["full"] * EXIT / LAYERS) < 2  # the head is whole


def experts_on_disk(path: Any, layer: int) -> dict[str, Tensor]:
    """Gate above up, and down, of every expert of a layer, by Mixtral's names and by Qwen's."""
    weights = sorted(load_file(path / "model.safetensors").items())  # fewer than ten experts, so that they are in order

    def stacked(*names: str) -> Tensor:
        ends = tuple(f".{name}.weight" for name in names)
        return torch.stack([one for key, one in weights if f"layers.{layer}." in key and key.endswith(ends)])

    gate_and_up = torch.cat([stacked("w1", "gate_proj"), stacked("w3", "up_proj")], dim=1)
    return {"w13_weight": gate_and_up, "w2_weight": stacked("w2", "down_proj")}


def experts_of(layer: nn.Module) -> Any:
    (runner,) = [part for part in layer.modules() if isinstance(part, MoERunner)]
    return runner


@pytest.mark.parametrize(
    ("name", "weights", "compiled"),
    [("mixtral", "fp8", False), ("qwen3_moe", "int8", False), ("qwen3_moe", "fp8", True)],
)
def test_experts_are_copied_and_however_wrong_they_are_the_output_is_the_targets(
    expected, made, name, weights, compiled
):
    """Wrong ones are also the proof that a compiled draft runs the copied experts, and not the target's by their
    name."""
    want, kind = expected(name), DRAFT_WEIGHTS[weights]
    with live(want.path, layer_skip(EXIT, K, draft_weights=weights), **(COMPILED if compiled else {})) as engine:
        want.check(engine, SOME).require_both_verdicts()
        copies = []
        for place, (copied, own) in enumerate(zip(made["trunk"].layers[:EXIT], made["target"].layers, strict=False)):
            draft, target, disk = experts_of(copied), experts_of(own), experts_on_disk(want.path, place)
            assert draft.router is target.router
            assert draft.layer_name != target.layer_name
            there, theirs = (
                copied_weights.plain_experts(kind, runner.routed_experts, "it") for runner in (draft, target)
            )
            for key, weight in disk.items():
                assert theirs[key].equal(weight)  # vLLM's CPU build keeps them packed
                copy = kind.dequantise(kind.quantise(weight.flatten(0, 1)), weight.dtype).view_as(weight)
                assert there[key].equal(copy) and not copy.equal(weight)
            copies.append(draft.routed_experts)
        spoil(copies, Tensor.zero_)
        counts = want.check(engine, SOME)
    assert counts.accepted < counts.drafted / 4, counts


class Products:
    """Stands in for vLLM's kernel for experts: what it would compute from copies with one scale a row, in PyTorch."""

    is_monolithic = can_overlap_shared_experts = False

    def __init__(self, w13_scale: Tensor, w2_scale: Tensor) -> None:
        self.scales, self.calls, self.fused_experts = (w13_scale, w2_scale), 0, self
        self.prepare_finalize, self.consumes_expert_mask = self, False

    def topk_indices_dtype(self) -> None:
        return None

    def output_is_reduced(self) -> bool:
        return False

    def apply(self, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: Any):
        self.calls += 1
        w13, w2 = (weight.float() * scale for weight, scale in zip((w1, w2), self.scales, strict=True))
        out = torch.zeros_like(hidden_states)
        for token, (weights, ids) in enumerate(zip(topk_weights.tolist(), topk_ids.tolist(), strict=True)):
            for share, expert in zip(weights, ids, strict=True):
                gate, up = F.linear(hidden_states[token], w13[expert]).chunk(2)
                out[token] += share * F.linear(F.silu(gate) * up, w2[expert])
        return out


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_on_the_kernels_of_a_kind(expected, monkeypatch, name):
    """The way of CUDA: a kernel of vLLM's over the copies themselves, with PyTorch inside it and inside the others."""
    made: list[Products] = []

    def kernels(layer: Any, w13: dict[str, Tensor], w2: dict[str, Tensor], **_: Any):
        made.append(Products(w13["scale"], w2["scale"]))
        return made[-1], object(), {"w13_weight": w13["weight"], "w2_weight": w2["weight"], "w13_scale": w13["scale"]}

    for module in (copied_weights, trunk):
        monkeypatch.setattr(module, "kernels_of", lambda kind, device: fp8_kernels)
    monkeypatch.setattr(fp8_kernels, "experts", kernels)
    for product in ("_tokens", "_one_token"):
        monkeypatch.setattr(fp8_kernels, product, lambda x, weight, scale: F.linear(x, weight.float() * scale))
    want = expected(name)
    with live(want.path, FP8) as engine:
        counts = want.check(engine, SOME)
    assert len(made) == EXIT and all(kernel.calls for kernel in made)
    assert 0.2 * counts.drafted < counts.accepted < counts.drafted, counts
