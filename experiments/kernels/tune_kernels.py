"""How fast tokens times integer copies are on the GPU at hand: by our kernels, by vLLM's Marlin, and by cuBLAS.

    python experiments/kernels/tune_kernels.py --bits 4 8 --tokens 1 4 16 32 64 --out kernels.json

Shapes are those of Llama 3 8B and, called small, of SmolLM2-135M-Instruct with four copies of each of its dimensions.
Each product rotates over more copies than the cache holds, inside a CUDA graph, as a draft step reads every weight from
memory, and follows a small kernel of PyTorch's that writes its tokens, whose own time is taken off. Figures: median
microseconds a product, and bytes read as a share of the card's own copy rate (bytes read plus bytes written). The
ceiling is a share of about 1.2: reading alone is faster. `error` is relative to a float32 product of the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product as every
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import lowbit_few_tokens, lowbit_one_token, marlin, rounding
from selfspec_cli.vllm_plugin.weights.gemv import gemv

SHAPES = {
    "o": (4096, 4096),
    "qkv": (6144, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
    "small_o": (2304, 2304),
    "small_qkv": (3840, 2304),
    "small_gate_up": (12288, 2304),
    "small_down": (2304, 6144),
    "small_lm_head": (49152, 2304),
}
ONE: list[dict[str, Any]] = [{}, *({"rows_at_once": rows, "at_once": groups}
                              for rows, groups in every((1, 2, 4, 8), (16, 32, 64)))]  # fmt: skip
"""Rows of a program and groups of a step, for one token; the first is what the product takes itself."""

FEW: list[dict[str, Any]] = [{}, *({"rows_at_once": rows, "parts": parts, "stages": stages}
                              for rows, parts, stages in every((16, 32, 64, 128), (1, 2, 4), (1, 2, 4)))]  # fmt: skip
"""The same for several tokens, with the parts that the inputs are cut into."""

NAMES = ("rows_at_once", "at_once", "parts", "stages")

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


def timed_behind(x: Tensor, products: Sequence[Callable[[], object]]) -> float:
    """`timed` of products of x, each behind a kernel that writes x, less the time of that kernel alone."""
    write = _writer(x)

    def both(product: Callable[[], object]) -> None:
        write()
        product()

    return timed([partial(both, product) for product in products]) - _alone(tuple(x.shape))


def _writer(x: Tensor) -> Callable[[], object]:
    source = x.clone()
    return lambda: torch.add(source, 0, out=x)


@cache
def _alone(shape: tuple[int, int]) -> float:
    """`timed` of a kernel that writes x [tokens, in]; the median of several, because everything depends on it."""
    write = _writer(torch.zeros(shape, device="cuda", dtype=torch.bfloat16))
    return statistics.median(timed([write] * 50) for _ in range(9))


def copy_rate() -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timed([lambda: target.copy_(source)] * 4) * 1e6


def several(tensors: dict[str, Tensor], room: int) -> tuple[list[dict[str, Tensor]], int]:
    """Copies of `tensors` that together take more than `room` bytes, and the bytes of one."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    more = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(room // size)]
    return [tensors, *more], size


def rows(
    shape: str,
    bits: Sequence[int],
    token_counts: Sequence[int],
    with_marlin: bool,
    time: Callable[[Tensor, Sequence[Callable[[], Tensor]]], float] = timed_behind,
    room: int = CACHE,
) -> Iterator[dict[str, Any]]:
    """Every product of one shape: bf16 by cuBLAS and our kernel, then each kind of copy in all ways."""
    out, inner = SHAPES[shape]
    weight = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    inputs = {tokens: torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) for tokens in token_counts}
    plain, size = several({"weight": weight}, room)
    for tokens, x in inputs.items():
        for name, product in [("cublas", F.linear), ("gemv", gemv)][: 2 if tokens == 1 else 1]:
            us = time(x, [partial(product, x, each["weight"]) for each in plain])
            yield {"shape": shape, "kind": name, "tokens": tokens, "us": us, "bytes": size}
    del plain
    for width in bits:
        kind = DRAFT_WEIGHTS[f"int{width}"]
        copy = kind.quantise(weight)
        dense = kind.dequantise(copy, torch.float32)
        counts = [tokens for tokens in token_counts if 1 < tokens <= rounding.MOST]
        ways: list[Way] = [(kind.name, _one, dict(copy), {1} & inputs.keys(), ONE),
                           (kind.name, _few, dict(copy), counts, FEW)]  # fmt: skip
        if with_marlin and marlin.serves(width, out, inner):
            repacked = marlin.repacked(copy, width)
            ways.append((f"{kind.name} marlin", _marlin, repacked, token_counts, [{}]))
        for name, product, tensors, counts, settings in ways:
            copies, size = several(tensors, room)
            for tokens, setting in every(counts, settings):
                x = inputs[tokens]
                calls = [partial(product, x, each, **setting) for each in copies]
                wanted = x.float() @ dense.T
                error = float((calls[0]().float() - wanted).norm() / wanted.norm())
                found = {"shape": shape, "kind": name, "tokens": tokens, **setting, "error": error}
                yield {**found, "us": time(x, calls), "bytes": size}
            del copies


def compiled(asked: tuple[str, int], token_counts: Sequence[int], with_marlin: bool) -> None:
    """Every kernel of one shape and width is compiled, and lies in Triton's cache from then on."""

    def once(x: Tensor, products: Sequence[Callable[[], Tensor]]) -> float:
        products[0]()
        return 0.0

    shape, width = asked
    for _ in rows(shape, [width], token_counts, with_marlin, once, 0):
        pass


Way = tuple[str, Callable[..., Tensor], dict[str, Tensor], Iterable[int], list[dict[str, Any]]]
"""Name of a product, its function, a copy as it reads it, numbers of tokens, and what to try with it."""


def _one(x: Tensor, copy: dict[str, Tensor], **setting: Any) -> Tensor:
    words, scales = copy["words"], copy["scales"]
    rounded = rounding.round_tokens(x, lowbit_one_token.width_of(words, x.shape[1]))
    return lowbit_one_token.product(*rounded, words, scales, None, x.dtype, **setting)


def _few(x: Tensor, copy: dict[str, Tensor], **setting: Any) -> Tensor:
    words, scales = copy["words"], copy["scales"]
    rounded = rounding.round_tokens(x, lowbit_one_token.width_of(words, x.shape[1]))
    return lowbit_few_tokens.product(*rounded, len(x), words, scales, None, x.dtype, **setting)


def _marlin(x: Tensor, copy: dict[str, Tensor]) -> Tensor:
    return marlin.product(x, copy["marlin"], copy["scales"])


def main() -> None:
    """Measure, print the best of each product, and write everything as JSON after each shape of layer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=(4, 8))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--no-marlin", action="store_true", help="without vLLM's kernels, which need vLLM")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile, before anything is timed")
    arguments = parser.parse_args()
    asked, with_marlin = list(every(arguments.shapes, arguments.bits)), not arguments.no_marlin
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compiled, token_counts=arguments.tokens, with_marlin=with_marlin), asked))
    rate = copy_rate()
    found: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e12:.2f} TB/s")
    for shape in arguments.shapes:
        for row in rows(shape, arguments.bits, arguments.tokens, with_marlin):
            found.append({**row, "share": row["bytes"] / row["us"] * 1e6 / rate})
        document = {"device": torch.cuda.get_device_name(), "copy_rate": rate, "rows": found}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        mine = [row for row in found if row["shape"] == shape]
        for kind, tokens in dict.fromkeys((row["kind"], row["tokens"]) for row in mine):
            tried = [row for row in mine if (row["kind"], row["tokens"]) == (kind, tokens)]
            best = min(tried, key=lambda row: row["us"])
            figures = f"{best['us']:7.1f} us {best['share']:.2f}"
            setting = " ".join(f"{name}={best[name]}" for name in NAMES if name in best)
            print(f"{shape:<8} {kind:<11} {tokens:>3} {figures}  {setting}", flush=True)


if __name__ == "__main__":
    main()
