"""How fast products with integer copies run, tile by tile, on the GPU at hand: python experiments/lowbit/tune_kernels.py.

Every weight of a step is read from memory, so each product rotates over more copies than the cache holds, inside a CUDA
graph. Figures: median microseconds a product, bytes read a second, and their share of the card's own copy rate (bytes
read plus bytes written).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from selfspec_cli.early_exit.draft_weights.integers import dequantise, quantise
from selfspec_cli.vllm_plugin.weights import lowbit
from selfspec_cli.vllm_plugin.weights.gemv import gemv as plain_gemv

SHAPES = {"o": (4096, 4096), "qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096)}
CACHE = 200 * 2**20

FEW = {
    1: [(8, 16, 4), (8, 16, 2), (16, 16, 4), (16, 8, 4), (16, 8, 2), (8, 8, 2), (4, 16, 2), (4, 16, 4), (8, 32, 4), (4, 32, 4), (16, 4, 2), (4, 8, 1)],
    2: [(8, 16, 4), (4, 16, 4), (8, 8, 4), (8, 8, 2), (4, 16, 2), (16, 8, 4)],
    4: [(4, 16, 4), (8, 8, 4), (4, 8, 2), (8, 16, 8), (4, 8, 4), (8, 4, 2)],
    8: [(4, 8, 4), (4, 16, 8), (2, 16, 4), (4, 4, 2)],
}  # fmt: skip
MANY = [(64, 8, 4, 3), (64, 4, 4, 3), (128, 8, 8, 3), (128, 4, 4, 3), (64, 8, 4, 2), (32, 8, 4, 3), (64, 16, 4, 2), (128, 4, 8, 4), (64, 4, 4, 5)]


def timed(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one of `calls`, which are replayed in turn as one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(samples[1:])


def copy_rate() -> float:
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / timed([lambda: b.copy_(a)] * 4) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[16])
    arguments = parser.parse_args()
    began, rows = time.time(), []
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copy rate {rate / 1e12:.2f} TB/s", flush=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def note(**row: object) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "copy_rate": rate, "rows": rows}, indent=1))

    for name in arguments.shapes:
        out, inner = SHAPES[name]
        weight = torch.randn(out, inner, device="cuda", generator=generator, dtype=torch.bfloat16)
        x = torch.randn(1, inner, device="cuda", generator=generator, dtype=torch.bfloat16)
        several = [weight] + [weight.clone() for _ in range(max(0, CACHE // (weight.numel() * 2)))]
        for kind, call in (("cublas", torch.nn.functional.linear), ("gemv", plain_gemv)):
            taken = timed([lambda w=w, call=call: call(x, w) for w in several])
            note(shape=name, kind=kind, bits=16, us=taken, share=weight.numel() * 2 / taken * 1e6 / rate)
        del several
        for bits in arguments.bits:
            for group in arguments.groups:
                if time.time() - began > arguments.seconds:
                    return
                tensors = quantise(weight, bits, group)
                exact = dequantise(tensors, bits, group)
                size = sum(t.numel() * t.element_size() for t in tensors.values())
                copies = [tensors] + [{k: v.clone() for k, v in tensors.items()} for _ in range(CACHE // size)]
                for n in arguments.tokens:
                    xs = torch.randn(n, inner, device="cuda", generator=generator, dtype=torch.bfloat16)
                    ref = xs.double() @ exact.double().T if name != "lm_head" else (xs @ exact.to(xs.dtype).T).double()
                    if n > 1 and group == arguments.groups[0]:
                        weights = [weight] + [weight.clone() for _ in range(max(0, CACHE // (weight.numel() * 2)))]
                        taken = timed([lambda w=w: torch.nn.functional.linear(xs, w) for w in weights])
                        note(shape=name, kind="cublas", tokens=n, us=taken, share=weight.numel() * 2 / taken * 1e6 / rate)
                        del weights
                    tries = [("few", tile) for tile in FEW.get(n, [])] + [("many", tile) for tile in MANY if n >= 4 and bits < 8]
                    for kind, tile in tries:
                        if time.time() - began > arguments.seconds:
                            return
                        more = {"tokens_tile": max(16, min(n, 64))} if kind == "many" else {}
                        call = getattr(lowbit, kind)
                        try:
                            calls = [lambda c=c: call(xs, c["words"], c.get("more"), c["scales"], bits, group, tile=tile, **more) for c in copies]
                            got = calls[0]().double()
                            taken = timed(calls)
                            note(shape=name, kind=kind, tokens=n, bits=bits, group=group, tile=tile, us=taken, share=size / taken * 1e6 / rate, error=float((got - ref).norm() / ref.norm()))
                        except Exception as problem:
                            note(shape=name, kind=kind, tokens=n, bits=bits, group=group, tile=tile, problem=str(problem)[-300:])


if __name__ == "__main__":
    main()
    print("\n".join(sorted(map(str, ["done"]))))
