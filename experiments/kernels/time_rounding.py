"""How fast norms and activations round their result for the product behind them, on the GPU at hand.

    python experiments/kernels/time_rounding.py --tokens 1 4 16 32 --out rounding.json

Each stands between two products with 4-bit or 8-bit copies, as in a layer that drafts: one that writes what it reads,
and one that reads what it rounds. `together` is vllm_plugin/weights/rounding.py with some settings, `apart` the kernel
that Inductor makes of the norm or the activation and one that only rounds. Figures: median microseconds of the three
kernels (or four) of a step, inside a CUDA graph that rotates over more copies than the cache holds; and the largest
difference between what the two ways find, relative to the largest value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as every
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tune_kernels import CACHE, several, timed

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import lowbit, rounding
from selfspec_cli.vllm_plugin.weights.one_token import none_arrived

NORMS = {"8b": (4096, 4096, 28672), "small": (2304, 2304, 12288)}
"""Inputs of the product in front, width of the norm, outputs of the product behind: the output projection and gate and
up of tune_kernels.py's shapes."""
ACTIVATIONS = {"8b": (4096, 14336, 4096), "small": (2304, 6144, 2304)}
"""The same for an activation, of which the product in front writes twice the width."""


@partial(torch.compile, dynamic=False)
def norm_apart(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    normed = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight
    return normed, total.to(x.dtype)


@partial(torch.compile, dynamic=False)
def activation_apart(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def copies(bits: int, rows: int, columns: int) -> list[tuple[Tensor, Tensor]]:
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
    copy = DRAFT_WEIGHTS[f"int{bits}"].quantise(weight)
    return [(one["words"], one["scales"]) for one in several(dict(copy), CACHE // 2)[0]]


def product(x: Tensor, rounded: tuple[Tensor, Tensor], copy: tuple[Tensor, Tensor]) -> Tensor:
    return lowbit._product(x, *rounded, copy[0], None, copy[1], None)


Way = tuple[str, dict[str, Any], Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]]
"""A name, settings, and what makes tokens, plain and rounded, of what a product wrote."""


def norms(tokens: int, width: int, bits: int) -> Iterator[Way]:
    residual = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)

    def apart(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed, _ = norm_apart(x, residual, weight)
        return normed, rounding.round_tokens(normed, bits)

    def together(x: Tensor, **settings: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed, _, rounded, factors = rounding.add_and_norm(x, residual, weight, 1e-5, bits, **settings)
        return normed, (rounded, factors)

    yield "apart", {}, apart
    for warps in (None, 4, 8, 16):
        yield "together", {"warps": warps}, partial(together, warps=warps)


def activations(tokens: int, width: int, bits: int) -> Iterator[Way]:
    def apart(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        values = activation_apart(x)
        return values, rounding.round_tokens(values, bits)

    def together(x: Tensor, **settings: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        values, rounded, factors = rounding.activate(x, bits, **settings)
        return values, (rounded, factors)

    yield "apart", {}, apart
    for at_once in (4, 8, 16):
        yield "together", {"at_once": at_once}, partial(together, at_once=at_once)


def rows(part: str, shape: str, tokens: int, bits: int) -> Iterator[dict[str, Any]]:
    front, width, behind = (NORMS if part == "norm" else ACTIVATIONS)[shape]
    before = copies(bits, width if part == "norm" else 2 * width, front)
    after = copies(bits, behind, width)
    x = torch.randn(tokens, front, device="cuda", dtype=torch.bfloat16)
    given = rounding.round_tokens(x, bits)
    ways = list((norms if part == "norm" else activations)(tokens, width, bits))
    wanted = None

    def step(number: int, between: Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]) -> Tensor:
        values, rounded = between(product(x, given, before[number % len(before)]))
        return product(values, rounded, after[number % len(after)])

    for name, settings, between in ways:
        found = step(0, between).float()
        wanted = found if wanted is None else wanted
        us = timed([partial(step, number, between) for number in range(max(len(before), len(after)))])
        error = float((found - wanted).abs().max() / wanted.abs().max())
        yield {"part": part, "shape": shape, "tokens": tokens, "bits": bits, "way": name, **settings, "us": us,
               "difference": error}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("rounding.json"))
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4], choices=(4, 8))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", default=["small", "8b"], choices=tuple(NORMS))
    arguments = parser.parse_args()
    none_arrived(torch.device("cuda", 0))
    found: list[dict[str, Any]] = []
    for asked in every(("norm", "activation"), arguments.shapes, arguments.tokens, arguments.bits):
        for row in rows(*asked):
            found.append(row)
            settings = " ".join(f"{name}={row[name]}" for name in ("warps", "at_once") if name in row)
            print(*asked, f"{row['way']:<9} {row['us']:7.2f} us  {row['difference']:.4f}  {settings}", flush=True)
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
