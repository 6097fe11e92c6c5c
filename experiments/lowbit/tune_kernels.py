"""How fast one token times integer copies is, tile by tile, on the GPU at hand.

    python experiments/lowbit/tune_kernels.py --bits 4 8 --out kernels.json

Shapes are those of Llama 3 8B. Each product rotates over more copies than the cache holds, inside a CUDA graph, as a
draft step reads every weight from memory. Figures: median microseconds a product, and bytes read as a share of the
card's own copy rate (bytes read plus bytes written). The ceiling is a share of about 1.2: reading alone is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import lowbit
from selfspec_cli.vllm_plugin.weights.gemv import gemv

SHAPES = {
    "o": (4096, 4096),
    "qkv": (6144, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
TILES = [(8, 16, 4), (16, 16, 4), (8, 32, 4), (16, 8, 4), (8, 16, 2), (16, 8, 2), (8, 8, 2), (4, 32, 4), (4, 16, 2)]
"""Rows, groups and warps of a program."""

CACHE = 200 * 2**20  # bytes; four times the second-level cache of an H100
REPLAYS = 7


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one of `calls`, replayed in turn as one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(samples[1:])  # the first replay uploads the graph


def copy_rate() -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timed([lambda: target.copy_(source)] * 4) * 1e6


def several(tensors: dict[str, Tensor]) -> tuple[list[dict[str, Tensor]], int]:
    """Copies of `tensors` that together exceed the cache, and the bytes of one."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    more = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(CACHE // size)]
    return [tensors, *more], size


def rows(shape: str, bits: Sequence[int]) -> list[dict[str, Any]]:
    """Every product of one shape: bf16 by cuBLAS and by our kernel, then each kind of copy by each tile."""
    out, inner = SHAPES[shape]
    weight = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, inner, device="cuda", dtype=torch.bfloat16)
    plain, size = several({"weight": weight})
    found = []
    for name, product in (("cublas", F.linear), ("gemv", gemv)):
        us = timed([partial(product, x, one["weight"]) for one in plain])
        found.append({"shape": shape, "kind": name, "us": us, "bytes": size})
    del plain
    for width in bits:
        kind = DRAFT_WEIGHTS[f"int{width}"]
        copies, size = several(kind.quantise(weight))
        wanted = x.float() @ kind.dequantise(copies[0], torch.float32).T
        for tile in TILES:
            calls = [partial(lowbit.product, x, c["words"], c.get("more"), c["scales"], tile=tile) for c in copies]
            error = float((calls[0]().float() - wanted).norm() / wanted.norm())
            row = {"shape": shape, "kind": kind.name, "tile": tile, "error": error}
            found.append({**row, "us": timed(calls), "bytes": size})
    return found


def parser_of(about: str, out: str) -> argparse.ArgumentParser:
    """The options that measuring kernels has whichever they are. about: a script's docstring; out: its file."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=(4, 5, 6, 8))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    return parser


def write(out: Path, rate: float, found: Sequence[dict[str, Any]]) -> None:
    """What was found so far, as JSON. rate: of the card's own copies, bytes a second."""
    document = {"device": torch.cuda.get_device_name(), "copy_rate": rate, "rows": found}
    out.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Measure, print the best tile of each product, and write everything as JSON."""
    arguments = parser_of(__doc__, "kernels.json").parse_args()
    rate = copy_rate()
    found: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e12:.2f} TB/s")
    for shape in arguments.shapes:
        for row in rows(shape, arguments.bits):
            found.append({**row, "share": row["bytes"] / row["us"] * 1e6 / rate})
        write(arguments.out, rate, found)
        for kind in dict.fromkeys(row["kind"] for row in found):
            mine = [row for row in found if (row["shape"], row["kind"]) == (shape, kind)]
            best = min(mine, key=lambda row: row["us"])
            print(f"{shape:<8} {kind:<7} {best['us']:7.1f} us {best['share']:.2f}  {best.get('tile', '')}", flush=True)


if __name__ == "__main__":
    main()
