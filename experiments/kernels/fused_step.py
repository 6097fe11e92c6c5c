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
from trunk_model import FEW_TOKENS, SHAPES, UNROUNDED, Model, Rounding, Step, bound, error, laid_out, reference

from selfspec_cli.vllm_plugin.attention.one_query import attend
from selfspec_cli.vllm_plugin.fused_step.drafting import EVENLY, MOST
from selfspec_cli.vllm_plugin.fused_step.launch import Arguments, Kernel, built
from selfspec_cli.vllm_plugin.fused_step.layout import Shape, planned
from selfspec_cli.vllm_plugin.fused_step.models import WARPS
from selfspec_cli.vllm_plugin.weights import few_tokens, one_token, rounding
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

PATIENCE: list[str] = []
"""How often the kernel asks for what another block should have written, before it ends with an error."""


# ---- one kernel -----------------------------------------------------------------------------------------------------


class Fused:
    """The kernel, for one number of tokens."""

    def __init__(
        self, model: Model, tokens: int, warps: int = WARPS, evenly: float = EVENLY, blocks: int | None = None
    ) -> None:
        shape, device = model.shape, torch.device("cuda")
        properties = torch.cuda.get_device_properties(device)
        plan = planned(shape, blocks or properties.multi_processor_count, warps, evenly)
        build = built(shape, plan, tokens, properties.shared_memory_per_block_optin)
        self.kernel = Kernel(build, device, None, PATIENCE)
        self.weights = {"weights": laid_out(model), "plan": plan.tensor().to(device)}

    def bind(self, step: Step) -> Callable[[], None]:
        """A call that runs the step."""
        return bound(self.kernel, Arguments, step, self.weights)


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
            return one_token.product(rounded, factors, copy["words"], copy["scales"], bias, torch.bfloat16)
        return few_tokens.product(rounded, factors, n, copy["words"], copy["scales"], bias, torch.bfloat16)

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


def check(run: Callable[[], None], step: Step, rounding: Rounding, loop: bool, beside: bool) -> dict[str, Any]:
    """A kernel's step, run three times and, with `loop`, as the body of a loop in a CUDA graph, against PyTorch, which
    rounds as the kernel does. beside: also what the separate kernels make of it."""
    live = [n for n, length in enumerate(step.lengths.tolist()) if length]
    wanted, written = reference(step, rounding)
    plain, _ = reference(step, UNROUNDED)
    before = [cache.clone() for cache in step.caches]
    outs = []
    for _ in range(3):
        step.out.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        outs.append(step.out[live].clone())
    page, cache_error, untouched = step.model.shape.page, 0.0, True
    for cache, old, new in zip(step.caches, before, written, strict=True):
        kept = cache.clone()
        for n in live:
            place = (int(step.slots[n]) // page, slice(None), int(step.slots[n]) % page)
            cache_error = max(cache_error, error(cache[place], new[n]))
            kept[place] = old[place]
        untouched &= torch.equal(kept, old)
    row = {
        "error": error(outs[0], wanted[live]),
        "cache_error": cache_error,
        "untouched": untouched,
        "same_again": all(torch.equal(outs[0], other) for other in outs),
        "error_unrounded": error(outs[0], plain[live]),
    }
    if loop:
        run()
        row["looped"] = looped(run, step, step.out.clone())
    if beside and not step.model.shape.head_norms:
        row["separate_error_unrounded"] = error(separate(step)[live], plain[live])
    return row


def demand_right(row: dict[str, Any]) -> None:
    """Show what `check` found, and end with an AssertionError where it is wrong."""
    print(json.dumps(row), flush=True)
    assert row["error"] < 0.01 and row["cache_error"] < 0.01 and row["untouched"] and row["same_again"], row


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
    parser.add_argument("--tiny", action="store_true", help="small steps on few blocks, for compute-sanitizer")
    parser.add_argument("--patience", type=int, help="end with an error after so many tries to read a word")
    arguments = parser.parse_args()
    PATIENCE.extend([] if arguments.patience is None else [f"-DPATIENCE={arguments.patience}"])
    none_arrived(torch.device("cuda"))
    if arguments.tiny:
        tiny(arguments.tokens)
        os._exit(0)
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
                    step = Step(small, lengths)
                    row = check(fused.bind(step), step, FEW_TOKENS, True, not arguments.no_separate)
                    about = {"shape": name, "layers": arguments.check_layers, "tokens": tokens, "lengths": lengths}
                    keep({**about, **row})
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


def tiny(widths: list[int]) -> None:
    """A step of each number of tokens with everything in it, on sixteen blocks."""
    model = Model(TINY)
    for tokens in widths:
        step = Step(model, CASES[tokens][0])
        row = check(Fused(model, tokens, blocks=16).bind(step), step, FEW_TOKENS, loop=False, beside=False)
        demand_right(row)


TINY = Shape(2, 1024, 2048, 8, 2, 128, 16, 1e-6, bias=True, head_norms=True)
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
