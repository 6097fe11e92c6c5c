"""A trunk of random weights, the inputs of a draft step, and the step in PyTorch, which kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import INT4, integers
from selfspec_cli.vllm_plugin.fused_step.launch import Kernel, pointer
from selfspec_cli.vllm_plugin.fused_step.layout import Shape, gate_and_up, layer_of, records

SHAPES = {
    "qwen2.5_1.5b": Shape(28, 1536, 8960, 12, 2, 128, 16, 1e-6, bias=True),
    "qwen2.5_0.5b": Shape(24, 896, 4864, 14, 2, 64, 16, 1e-6, bias=True),
    "qwen3_0.6b": Shape(28, 1024, 3072, 16, 8, 128, 16, 1e-6, head_norms=True),
    "llama3_8b": Shape(32, 4096, 14336, 32, 8, 128, 16, 1e-5, rope_float=True),
}
VOCABULARY, POSITIONS = 1000, 32768
LOG2_E = 1.4426950408889634


class Model:
    """Random weights of a shape, and their copies.

    distinct: layers with weights of their own, to time with: the others have the same values elsewhere in memory.
    """

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cuda", distinct: int | None = None) -> None:
        torch.manual_seed(seed)
        self.shape, self.device = shape, device
        rows = {"qkv": shape.qkv, "o": shape.hidden, "gate_up": 2 * shape.intermediate, "down": shape.hidden}
        self.layers: list[dict[str, Any]] = []
        for number in range(shape.layers):
            if distinct is not None and number >= distinct:
                self.layers.append(_cloned(self.layers[number % distinct]))
                continue
            copies = {}
            for name, groups in shape.groups.items():
                columns = groups * 64
                weight = torch.randn(rows[name], columns, device=device) * columns**-0.5
                copies[name] = INT4.quantise(weight * (0.5 if name in ("o", "down") else 1.0))
            norms = (1 + 0.1 * torch.randn(2, shape.hidden, device=device)).bfloat16()
            self.layers.append(
                {
                    "copies": copies,
                    "norms": norms,
                    "bias": torch.randn(shape.qkv, device=device).bfloat16() if shape.bias else None,
                    "head_norms": (1 + 0.1 * torch.randn(2, shape.dim, device=device)).bfloat16(),
                }
            )
        self.embedding = torch.randn(VOCABULARY, shape.hidden, device=device).bfloat16()
        self.final_norm = (1 + 0.1 * torch.randn(shape.hidden, device=device)).bfloat16()
        inverse = 1e6 ** (-torch.arange(0, shape.dim, 2, device=device).float() / shape.dim)
        angles = torch.arange(POSITIONS + 64, device=device).float()[:, None] * inverse
        rope = torch.cat([angles.cos(), angles.sin()], 1)
        self.rope = rope if shape.rope_float else rope.bfloat16()


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    return None if value is None else value.clone()


class Step:
    """Inputs of a draft step: `lengths` tokens of each request with the new one, 0 for a closed one."""

    def __init__(self, model: Model, lengths: list[int], room: int | None = None) -> None:
        shape, n, device = model.shape, len(lengths), model.device
        self.model, self.lengths = model, torch.tensor(lengths, dtype=torch.int32, device=device)
        pages = -(-(room or max(*lengths, 1)) // shape.page)
        order = torch.randperm(n * pages, device=device)
        self.table = order.view(n, pages).int()
        self.caches = [
            torch.randn(n * pages, shape.heads, shape.page, 2 * shape.dim, device=device).bfloat16()
            for _ in range(shape.layers)
        ]
        self.ids = torch.randint(VOCABULARY, (n,), device=device, dtype=torch.int32)
        self.positions = (self.lengths.long() - 1).clamp(min=0)
        at = self.positions // shape.page
        self.slots = self.table.gather(1, at[:, None])[:, 0].long() * shape.page + self.positions % shape.page
        self.slots[self.lengths == 0] = -1
        self.out = torch.empty(n, shape.hidden, device=device, dtype=torch.bfloat16)


def tensors_of(step: Step) -> dict[str, Tensor | None]:
    """What both kernels read and write beside their weights and their own memory, by the names of their arguments."""
    model, layers = step.model, step.model.layers
    return {
        "norms": torch.stack([layer["norms"] for layer in layers]),
        "bias": torch.stack([layer["bias"] for layer in layers]) if model.shape.bias else None,
        "head_norms": torch.stack([layer["head_norms"] for layer in layers]),
        "final_norm": model.final_norm,
        "embedding": model.embedding,
        "rope": model.rope,
        "caches": torch.tensor([one.data_ptr() for one in step.caches], device=model.device),
        "ids": step.ids,
        "positions": step.positions,
        "lengths": step.lengths,
        "slots": step.slots,
        "table": step.table,
        "out": step.out,
    }


def numbers_of(step: Step) -> dict[str, int | float]:
    """Strides in elements, and the scale of scores."""
    block, head, token, _ = step.caches[0].stride()
    dim = step.model.shape.dim
    return {
        "cache_block": block,
        "cache_head": head,
        "cache_token": token,
        "cache_value": dim,
        "table_row": step.table.stride(0),
        "scale": dim**-0.5 * LOG2_E,
    }


def bound(kernel: Kernel, arguments: type, step: Step, weights: dict[str, Tensor], **more: int) -> Callable[[], None]:
    """A call of a kernel for a step. weights: and its own memory; more: numbers that this kernel has besides."""
    tensors = {**weights, **tensors_of(step)}
    given = arguments(**{name: pointer(one) for name, one in tensors.items()}, **numbers_of(step), **more)

    def run(_: object = tensors) -> None:  # which lives as long as the call
        kernel(given)

    return run


def laid_out(model: Model) -> Tensor:
    """The copies of all layers as both kernels read them."""
    layers = []
    for layer in model.layers:
        copies = {**layer["copies"], "gate_up": gate_and_up(layer["copies"]["gate_up"])}
        layers.append(layer_of({name: records(copy) for name, copy in copies.items()}))
    return torch.stack(layers)


# ---- in PyTorch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """Where a kernel rounds: activations that it multiplies, copies of weights, the residual, and what is stored."""

    activations: Callable[[Tensor], Tensor]
    weights: Callable[[dict[str, Tensor]], Tensor]
    residual: Callable[[Tensor], Tensor]
    stored: Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _short(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _bytes(x: Tensor) -> Tensor:
    """Signed bytes times a factor for 32 columns."""
    parts = x.unflatten(1, (-1, 32))
    factor = parts.abs().amax(2, keepdim=True) / 127
    return (torch.where(factor > 0, parts / factor, 0).round() * factor).flatten(1)


def _whole_weight(copy: dict[str, Tensor]) -> Tensor:
    return INT4.dequantise(copy, torch.float32)


def _short_weight(copy: dict[str, Tensor]) -> Tensor:
    """Integers times their scales in bf16, in bf16."""
    return _short(integers(copy, 4).float() * _short(copy["scales"].float()).unsqueeze(2)).flatten(1)


UNROUNDED = Rounding(_same, _whole_weight, _same, _same)
FEW_TOKENS = Rounding(_bytes, _whole_weight, _short, _short)
MANY_TOKENS = Rounding(_short, _short_weight, _same, _short)


def reference(step: Step, rounding: Rounding) -> tuple[Tensor, list[Tensor]]:
    """The step in float32 on the copies' weights, and what it would write to each cache, [n, heads, 2 * dim]."""
    model, shape = step.model, step.model.shape
    n, dim, heads, groups = len(step.lengths), shape.dim, shape.heads, shape.query_heads // shape.heads
    short = rounding.stored

    def times(x: Tensor, layer: dict[str, Any], name: str) -> Tensor:
        return rounding.activations(x) @ rounding.weights(layer["copies"][name]).t()

    def normed(x: Tensor, layer: dict[str, Any], which: int, name: str) -> Tensor:
        x = rounding.residual(x)
        factor = (x.square().mean(1, keepdim=True) + shape.epsilon).rsqrt()
        return times(x * layer["norms"][which].float(), layer, name) * factor

    x, written = model.embedding[step.ids.long()].float(), []
    cosine, sine = model.rope[step.positions].float().chunk(2, dim=1)
    for layer, cache in zip(model.layers, step.caches, strict=True):
        qkv = normed(x, layer, 0, "qkv")
        if shape.bias:
            qkv = qkv + layer["bias"].float()
        parts = short(qkv).split([shape.query_heads * dim, heads * dim, heads * dim], dim=1)
        q, k, v = (part.view(n, -1, dim) for part in parts)
        if shape.head_norms:
            q, k = (
                one * (one.square().mean(2, keepdim=True) + shape.epsilon).rsqrt() * weight.float()
                for one, weight in ((q, layer["head_norms"][0]), (k, layer["head_norms"][1]))
            )
        q, k = (short(_turned(one, cosine[:, None], sine[:, None])) for one in (q, k))
        written.append(torch.cat([k, v], 2))
        attended = torch.zeros(n, heads, groups, dim, device=model.device)
        for r, length in enumerate(step.lengths.tolist()):
            if length:
                pages = cache[step.table[r].long()].transpose(1, 2).flatten(0, 1)[: length - 1].float()
                keys = torch.cat([pages, torch.cat([k[r], v[r]], 1)[None]])  # [length, heads, 2 * dim]
                scores = torch.einsum("hgd,lhd->hgl", q[r].view(heads, groups, dim), keys[..., :dim]) * dim**-0.5
                attended[r] = torch.einsum("hgl,lhd->hgd", scores.softmax(2), keys[..., dim:])
        x = x + times(short(attended.flatten(1)), layer, "o")
        gate, up = normed(x, layer, 1, "gate_up").chunk(2, dim=1)
        x = x + times(short(torch.nn.functional.silu(gate) * up), layer, "down")
    x = rounding.residual(x)
    return x * (x.square().mean(1, keepdim=True) + shape.epsilon).rsqrt() * model.final_norm.float(), written


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=2)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], 2)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, by norms."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
