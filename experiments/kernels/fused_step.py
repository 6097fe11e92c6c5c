"""A draft step through all decoder layers on 4-bit copies: the kernel for the whole trunk, and the kernels it replaces.

    python experiments/kernels/fused_step.py --out fused_step.json

Random weights of real shapes, and random caches with random block tables. First the result is compared with the same
step in PyTorch, with tokens rounded as the kernel rounds them (`error`) and without any rounding (`error_unrounded`,
beside that of the kernels it replaces), and the keys and values that it wrote with those of the reference. Then both
are timed in CUDA graphs. Figures: microseconds a step, median and the ends of the middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.int4 import WEIGHTS
from selfspec_cli.vllm_plugin.attention.one_query import LOG2_E, attend
from selfspec_cli.vllm_plugin.fused_step.drafting import EVENLY, MOST
from selfspec_cli.vllm_plugin.fused_step.launch import Arguments, Kernel, built, pointer
from selfspec_cli.vllm_plugin.fused_step.layout import Shape, Stream, gate_and_up, planned, records
from selfspec_cli.vllm_plugin.fused_step.models import WARPS
from selfspec_cli.vllm_plugin.weights import lowbit_few_tokens, lowbit_one_token, rounding
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

SHAPES = {
    "qwen2.5_1.5b": Shape(28, 1536, 8960, 12, 2, 128, 16, 1e-6, bias=True),
    "qwen2.5_0.5b": Shape(24, 896, 4864, 14, 2, 64, 16, 1e-6, bias=True),
    "qwen3_0.6b": Shape(28, 1024, 3072, 16, 8, 128, 16, 1e-6, head_norms=True),
    "llama3_8b": Shape(32, 4096, 14336, 32, 8, 128, 16, 1e-5, rope_float=True),
}
VOCABULARY, POSITIONS = 1000, 32768
PATIENCE: list[str] = []
"""How often the kernel asks for what another block should have written, before it ends with an error."""


class Model:
    """Random weights of a shape, their copies, and caches for `tokens` requests of up to `room` tokens."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        rows = {"qkv": shape.qkv, "o": shape.hidden, "gate_up": 2 * shape.intermediate, "down": shape.hidden}
        self.layers: list[dict[str, Any]] = []
        for _ in range(shape.layers):
            copies = {}
            for name, groups in shape.groups.items():
                columns = groups * 64
                weight = torch.randn(rows[name], columns, device="cuda") * columns**-0.5
                copies[name] = WEIGHTS.quantise(weight * (0.5 if name in ("o", "down") else 1.0))
            norms = (1 + 0.1 * torch.randn(2, shape.hidden, device="cuda")).bfloat16()
            self.layers.append(
                {
                    "copies": copies,
                    "norms": norms,
                    "bias": torch.randn(shape.qkv, device="cuda").bfloat16() if shape.bias else None,
                    "head_norms": (1 + 0.1 * torch.randn(2, shape.dim, device="cuda")).bfloat16(),
                }
            )
        self.embedding = torch.randn(VOCABULARY, shape.hidden, device="cuda").bfloat16()
        self.final_norm = (1 + 0.1 * torch.randn(shape.hidden, device="cuda")).bfloat16()
        inverse = 1e6 ** (-torch.arange(0, shape.dim, 2, device="cuda").float() / shape.dim)
        angles = torch.arange(POSITIONS + 64, device="cuda").float()[:, None] * inverse
        rope = torch.cat([angles.cos(), angles.sin()], 1)
        self.rope = rope if shape.rope_float else rope.bfloat16()


class Step:
    """Inputs of a draft step: `lengths` tokens of each request with the new one, 0 for a closed one."""

    def __init__(self, model: Model, lengths: list[int], room: int | None = None) -> None:
        shape, n = model.shape, len(lengths)
        self.model, self.lengths = model, torch.tensor(lengths, dtype=torch.int32, device="cuda")
        pages = -(-(room or max(*lengths, 1)) // shape.page)
        order = torch.randperm(n * pages, device="cuda")
        self.table = order.view(n, pages).int()
        self.caches = [
            torch.randn(n * pages, shape.heads, shape.page, 2 * shape.dim, device="cuda").bfloat16()
            for _ in range(shape.layers)
        ]
        self.ids = torch.randint(VOCABULARY, (n,), device="cuda", dtype=torch.int32)
        self.positions = (self.lengths.long() - 1).clamp(min=0)
        at = self.positions // shape.page
        self.slots = self.table.gather(1, at[:, None])[:, 0].long() * shape.page + self.positions % shape.page
        self.slots[self.lengths == 0] = -1
        self.out = torch.empty(n, shape.hidden, device="cuda", dtype=torch.bfloat16)


# ---- in PyTorch -----------------------------------------------------------------------------------------------------


def rounded(x: Tensor, on: bool) -> Tensor:
    """Signed bytes times a factor for 32 columns, as the kernel has tokens."""
    if not on:
        return x
    parts = x.unflatten(1, (-1, 32))
    factor = parts.abs().amax(2, keepdim=True) / 127
    return (torch.where(factor > 0, parts / factor, 0).round() * factor).flatten(1)


def reference(step: Step, rounds: bool) -> tuple[Tensor, list[Tensor]]:
    """The step in float32 on the copies' weights, and what it would write to each cache, [n, heads, 2 * dim]."""
    model, shape = step.model, step.model.shape
    n, dim, heads, groups = len(step.lengths), shape.dim, shape.heads, shape.query_heads // shape.heads
    short = (lambda x: x.bfloat16().float()) if rounds else (lambda x: x)

    def times(x: Tensor, layer: dict[str, Any], name: str) -> Tensor:
        return rounded(x, rounds) @ WEIGHTS.dequantise(layer["copies"][name], torch.float32).t()

    def normed(x: Tensor, layer: dict[str, Any], which: int, name: str) -> Tensor:
        x = short(x)
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
        attended = torch.zeros(n, heads, groups, dim, device="cuda")
        for r, length in enumerate(step.lengths.tolist()):
            if length:
                pages = cache[step.table[r].long()].transpose(1, 2).flatten(0, 1)[: length - 1].float()
                keys = torch.cat([pages, torch.cat([k[r], v[r]], 1)[None]])  # [length, heads, 2 * dim]
                scores = torch.einsum("hgd,lhd->hgl", q[r].view(heads, groups, dim), keys[..., :dim]) * dim**-0.5
                attended[r] = torch.einsum("hgl,lhd->hgd", scores.softmax(2), keys[..., dim:])
        x = x + times(short(attended.flatten(1)), layer, "o")
        gate, up = normed(x, layer, 1, "gate_up").chunk(2, dim=1)
        x = x + times(short(torch.nn.functional.silu(gate) * up), layer, "down")
    x = short(x)
    return x * (x.square().mean(1, keepdim=True) + shape.epsilon).rsqrt() * model.final_norm.float(), written


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=2)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], 2)


# ---- one kernel -----------------------------------------------------------------------------------------------------


class Fused:
    """The kernel, for one number of tokens."""

    def __init__(self, model: Model, tokens: int, warps: int = WARPS, evenly: float = EVENLY) -> None:
        shape, device = model.shape, torch.device("cuda")
        properties = torch.cuda.get_device_properties(device)
        plan = planned(shape, properties.multi_processor_count, warps, evenly)
        build = built(shape, plan, tokens, properties.shared_memory_per_block_optin)
        self.kernel = Kernel(build, device, None, PATIENCE)
        self.stream = Stream(shape, plan, device)
        for number, layer in enumerate(model.layers):
            copies = {**layer["copies"], "gate_up": gate_and_up(layer["copies"]["gate_up"])}
            self.stream.put(number, {name: records(copy) for name, copy in copies.items()})
        self.plan = plan.tensor().to(device)
        self.norms = torch.stack([layer["norms"] for layer in model.layers])
        self.bias = torch.stack([layer["bias"] for layer in model.layers]) if shape.bias else None
        self.head_norms = torch.stack([layer["head_norms"] for layer in model.layers])

    def bind(self, step: Step) -> Callable[[], None]:
        """A call that runs the step."""
        model, cache = step.model, step.caches[0]
        self.caches = torch.tensor([one.data_ptr() for one in step.caches], device="cuda")
        tensors = {
            "stream": self.stream.records,
            "offsets": self.stream.offsets,
            "plan": self.plan,
            "norms": self.norms,
            "bias": self.bias,
            "head_norms": self.head_norms,
            "final_norm": model.final_norm,
            "embedding": model.embedding,
            "rope": model.rope,
            "caches": self.caches,
            "ids": step.ids,
            "positions": step.positions,
            "lengths": step.lengths,
            "slots": step.slots,
            "table": step.table,
            "out": step.out,
        }
        arguments = Arguments(
            **{name: pointer(tensor) for name, tensor in tensors.items()},
            cache_block=cache.stride(0),
            cache_head=cache.stride(1),
            cache_token=cache.stride(2),
            cache_value=model.shape.dim,
            table_row=step.table.stride(0),
            scale=model.shape.dim**-0.5 * LOG2_E,
        )
        return lambda: self.kernel(arguments)


# ---- the kernels that it replaces -----------------------------------------------------------------------------------


@triton.jit
def _turn(qkv, rope, positions, row, DIM: tl.constexpr):
    token, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM // 2)
    at = rope + tl.load(positions + token) * DIM + i
    cosine, sine = tl.load(at).to(tl.float32), tl.load(at + DIM // 2).to(tl.float32)
    place = qkv + token * row + head * DIM + i
    x, y = tl.load(place).to(tl.float32), tl.load(place + DIM // 2).to(tl.float32)
    tl.store(place, (x * cosine - y * sine).to(tl.bfloat16))
    tl.store(place + DIM // 2, (y * cosine + x * sine).to(tl.bfloat16))


def separate(step: Step) -> Tensor:
    """The step by the plugin's kernels for single products, norms, activations and attention. No norms of heads."""
    model, shape, n = step.model, step.model.shape, len(step.lengths)
    sizes = [shape.query_heads * shape.dim, shape.heads * shape.dim, shape.heads * shape.dim]

    def times(rounded: Tensor, factors: Tensor, copy: dict[str, Tensor], bias: Tensor | None = None) -> Tensor:
        if n == 1:
            return lowbit_one_token.product(rounded, factors, copy["words"], copy["scales"], bias, torch.bfloat16)
        return lowbit_few_tokens.product(rounded, factors, n, copy["words"], copy["scales"], bias, torch.bfloat16)

    x, residual = model.embedding[step.ids.long()], torch.zeros_like(step.out)
    for layer, cache in zip(model.layers, step.caches, strict=True):
        copies, norms = layer["copies"], layer["norms"]
        _, residual, some, factors = rounding.add_and_norm(x, residual, norms[0], shape.epsilon, 4)
        qkv = times(some, factors, copies["qkv"], layer["bias"])
        turned = (n, shape.query_heads + shape.heads)
        _turn[turned](qkv, model.rope, step.positions, qkv.stride(0), shape.dim, num_warps=1)
        q, k, v = (part.unflatten(1, (-1, shape.dim)) for part in qkv.split(sizes, dim=1))
        out = torch.empty(n, sizes[0], device="cuda", dtype=torch.bfloat16)
        attend(q, k, v, cache, step.table, step.lengths, step.slots, shape.dim**-0.5, out)
        x = times(*rounding.round_tokens(out, 4), copies["o"])
        _, residual, some, factors = rounding.add_and_norm(x, residual, norms[1], shape.epsilon, 4)
        gated = times(some, factors, copies["gate_up"])
        x = times(*rounding.activate(gated, 4)[1:], copies["down"])
    return rounding.add_and_norm(x, residual, model.final_norm, shape.epsilon, 0)[0]


# ---- checks and times -----------------------------------------------------------------------------------------------


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, by norms."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def check(model: Model, fused: Fused, lengths: list[int], beside: bool) -> dict[str, Any]:
    """One step of the kernel, run three times and then in a loop inside a CUDA graph, against PyTorch."""
    step, live = Step(model, lengths), [n for n, length in enumerate(lengths) if length]
    wanted, written = reference(step, rounds=True)
    plain, _ = reference(step, rounds=False)
    before = [cache.clone() for cache in step.caches]
    run = fused.bind(step)
    outs = []
    for _ in range(3):
        step.out.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        outs.append(step.out.clone())
    page, cache_error, untouched = model.shape.page, 0.0, True
    for cache, old, new in zip(step.caches, before, written, strict=True):
        for n in live:
            slot = int(step.slots[n])
            cache_error = max(cache_error, error(cache[slot // page, :, slot % page], new[n]))
            cache[slot // page, :, slot % page] = old[slot // page, :, slot % page]
        untouched &= torch.equal(cache, old)
    row = {
        "lengths": lengths,
        "error": error(outs[0][live], wanted[live]),
        "cache_error": cache_error,
        "untouched": untouched,
        "same_again": all(torch.equal(outs[0], other) for other in outs),
        "error_unrounded": error(outs[0][live], plain[live]),
        "looped": looped(run, step, outs[0]),
    }
    if beside and not model.shape.head_norms:
        row["separate_error_unrounded"] = error(separate(step)[live], plain[live])
    return row


def looped(run: Callable[[], None], step: Step, wanted: Tensor) -> bool:
    """Whether the kernel gives the same as the body of a loop that ends on the device."""
    from selfspec_cli.vllm_plugin.v2.device_loop import DeviceLoop

    loop, flag = DeviceLoop(torch.device("cuda")), torch.full((), 3, dtype=torch.int32, device="cuda")

    def body() -> None:
        run()
        flag.sub_(1)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.capture(flag, body)
    for _ in range(2):
        flag.fill_(3)
        step.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    return torch.equal(step.out, wanted) and int(flag) == 0


def timed(call: Callable[[], object], samples: int = 30) -> list[float]:
    """Microseconds of a replay: lower quartile, median, upper quartile."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    found = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / 4)
    return [round(one, 1) for one in statistics.quantiles(found[3:], n=4)]


def main() -> None:
    """Check, then time, and write all as JSON after each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("fused_step.json"))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="as many layers, in place of the shape's")
    parser.add_argument("--check-layers", type=int, default=2)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--settings", nargs="+", default=[f"{WARPS},{EVENLY}"], help="warps, evenly")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-separate", action="store_true")
    parser.add_argument("--patience", type=int, help="end with an error after so many tries to read a word")
    arguments = parser.parse_args()
    PATIENCE.extend([] if arguments.patience is None else [f"-DPATIENCE={arguments.patience}"])
    none_arrived(torch.device("cuda"))
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    settings = [(int(warps), float(evenly)) for warps, evenly in (one.split(",") for one in arguments.settings)]
    for name in arguments.shapes:
        shape = SHAPES[name]
        if not arguments.no_check:
            small = Model(replace(shape, layers=arguments.check_layers))
            for tokens in filter(CASES.get, arguments.tokens):
                fused = Fused(small, tokens, *settings[0])
                for lengths in CASES[tokens]:
                    row = check(small, fused, lengths, not arguments.no_separate)
                    keep({"shape": name, "layers": arguments.check_layers, "tokens": tokens, **row})
        model = Model(replace(shape, layers=arguments.layers or shape.layers))
        for tokens in arguments.tokens:
            if not arguments.no_separate and not shape.head_norms:
                for context in arguments.contexts:
                    step = Step(model, [context] * tokens)
                    us = timed(lambda step=step: separate(step))
                    keep({"shape": name, "tokens": tokens, "context": context, "separate_us": us})
                    del step
            for setting in settings if tokens <= MOST else ():
                began = time.perf_counter()
                fused = Fused(model, tokens, *setting)
                seconds = round(time.perf_counter() - began, 2)
                for context in arguments.contexts:
                    step = Step(model, [context] * tokens)
                    us = timed(fused.bind(step))
                    build = {"made_s": seconds, "slots": fused.kernel.build.slots, "spilled": fused.kernel.spilled}
                    row = {"shape": name, "tokens": tokens, "context": context, "setting": setting, **build}
                    keep({**row, "fused_us": us})
                    del step
                del fused
        del model
    os._exit(0)  # without CUDA's own end, which can wait for ever


CASES: dict[int, list[list[int]]] = {
    1: [[1], [2], [9], [70], [300], [1500], [5000]],
    2: [[5, 200], [0, 33], [1000, 3]],
    3: [[1, 0, 77]],
    4: [[1, 2, 17, 130], [600, 0, 0, 64], [3000, 100, 1, 40], [500, 500, 500, 500]],
    5: [[1, 5, 17, 0, 130]],
    6: [[700, 5, 0, 40, 130, 64]],
    7: [[1, 5, 17, 40, 0, 130, 64]],
    8: [[1, 5, 17, 40, 0, 130, 64, 9], [3000, 0, 1, 40, 700, 129, 2, 64], [500] * 8],
}
"""Lengths of requests to check each number of tokens with."""


if __name__ == "__main__":
    main()
