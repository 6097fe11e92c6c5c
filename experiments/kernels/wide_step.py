"""A draft step of 9 to 64 tokens as one kernel: compared with PyTorch, timed beside the kernels for single products.

    PYTHONPATH=. python experiments/kernels/wide_step.py --out wide_step.json

For each shape and number of tokens the result of two layers is compared with the same step in PyTorch, rounded as the
kernel rounds it (`error`) and not at all (`error_unrounded`), and the keys and values that it writes with those of the
reference. Then all layers are timed in CUDA graphs, beside the separate kernels where they know the number of tokens.
Figures: microseconds a step, median and the ends of the middle half. --stamps adds where the time goes, by the clock of
the device. --tiny runs one small step on eight blocks, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fused_step import check, demand_right, separate, timed
from torch import Tensor
from trunk_model import MANY_TOKENS, SHAPES, Model, Step, bound, laid_out

from selfspec_cli.vllm_plugin.fused_step.launch import Kernel, WideArguments
from selfspec_cli.vllm_plugin.fused_step.layout import Shape
from selfspec_cli.vllm_plugin.fused_step.wide.layout import STAMPS, WARPS, WIDTHS, built
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

TINY = Shape(2, 256, 512, 4, 2, 64, 16, 1e-6, bias=True, head_norms=True)
MOST_SEPARATE = 32  # tokens that the kernels for single products know
PATIENCE = "-DPATIENCE=2000000"  # tries to see a counter grow or a copy end, before a check ends with an error
MIXED = [1, 7, 8, 100, 300, 0, 17, 50, 600, 513, 64, 2, 0, 129, 1025, 33]
"""Lengths of requests in a check, over and over."""


class Wide:
    """The kernel for up to `most` tokens, and a model's weights as it reads them. See `built` for the others."""

    def __init__(
        self,
        model: Model,
        most: int,
        warps: int | None,
        options: list[str],
        blocks: int | None = None,
    ) -> None:
        device = torch.device("cuda")
        properties: Any = torch.cuda.get_device_properties(device)
        blocks = blocks or properties.multi_processor_count
        self.build = built(model.shape, blocks, most, properties.shared_memory_per_block_optin, warps)
        began = time.perf_counter()
        self.kernel = Kernel(self.build, device, None, options)
        self.compiled_s = round(time.perf_counter() - began, 2)
        self.stamps = torch.zeros(blocks, model.shape.layers, len(STAMPS), dtype=torch.int64, device=device)
        self.weights = {"weights": laid_out(model), "stamps": self.stamps}

    def bind(self, step: Step) -> Callable[[], None]:
        """A call that runs the step."""
        return bound(self.kernel, WideArguments, step, self.weights, tokens=len(step.lengths))

    def facts(self) -> dict[str, Any]:
        """The plan, and what the compiler made of it."""
        build = self.build
        plan = {
            "rows": build.rows,
            "down": (build.down_rows, build.down_slices),
            "tiles": build.tiles_of_warp,
        }
        rings = {"slab": build.slab, "weight_slots": build.weight_slots, "input_slots": build.input_slots}
        sizes = {"shared": build.shared_bytes, "spilled": self.kernel.spilled, "compiled_s": self.compiled_s}
        return {"warps": build.warps, **plan, **rings, **sizes}


def phases_of(stamps: Tensor) -> dict[str, list[float]]:
    """Microseconds from each point of a layer to the next one in time: median over layers of the median and of the
    largest block. A layer begins with the end of the one before."""
    order = [*range(3), 12, 13, 14, *range(3, 12), 15, 16]  # in which a block comes to them
    blocks = stamps.cpu().double()[:, 1:, order]
    start = stamps.cpu().double()[:, :-1, order[-1:]]
    before = torch.cat([start, blocks[:, :, :-1]], 2)
    found = {}
    for n, point in enumerate(order):
        there = (blocks[:, 0, n] > 0) & (before[:, 0, n] > 0)  # a block without tiles does not come to all points
        spent = (blocks[there, :, n] - before[there, :, n]) / 1000
        if len(spent):
            found[STAMPS[point]] = [round(float(one), 2) for one in (spent.median(), spent.amax(0).median())]
    return found


def tiny(options: list[str]) -> None:
    """One step with everything in it, on eight blocks."""
    model = Model(TINY)
    for most, lengths in ((16, MIXED), (32, MIXED + MIXED[:7])):
        step = Step(model, lengths)
        row = check(Wide(model, most, None, options, blocks=8).bind(step), step, MANY_TOKENS, loop=False, beside=False)
        demand_right(row)


def checks(shape: Shape, tokens: int, warps: int | None) -> list[dict[str, Any]]:
    """Two layers, with a full step and with fewer tokens than the kernel is compiled for."""
    model = Model(replace(shape, layers=2))
    wide = Wide(model, tokens, warps, [PATIENCE])
    found = []
    for count in (tokens - 7, tokens):
        step = Step(model, (MIXED * 4)[:count])
        row = check(wide.bind(step), step, MANY_TOKENS, loop=True, beside=False)
        found.append({"warps": wide.build.warps, "checked_tokens": count, **row})
    return found


def times(model: Model, step: Step, tokens: int, stamps: bool, warps: int | None) -> dict[str, Any]:
    """Of all layers."""
    wide = Wide(model, tokens, warps, [])
    row = {"wide_us": timed(wide.bind(step)), **wide.facts()}
    if stamps:
        stamped = Wide(model, tokens, warps, ["-DSTAMPS"])
        row |= {"stamped_us": timed(stamped.bind(step)), "phases_us": phases_of(stamped.stamps)}
    return row


def main() -> None:
    """Check, then time, and write all as JSON after each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("wide_step.json"))
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5_1.5b", "llama3_8b"], choices=tuple(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64], choices=WIDTHS)
    parser.add_argument("--contexts", nargs="+", type=int, default=[512])
    parser.add_argument("--warps", nargs="+", type=int, choices=WARPS, help="in place of the planned number")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-separate", action="store_true")
    parser.add_argument("--stamps", action="store_true", help="where the time of a layer goes")
    parser.add_argument("--tiny", action="store_true", help="one small step alone")
    arguments = parser.parse_args()
    if arguments.tiny:
        tiny([PATIENCE, "-DARRIVING=32"])
        return
    none_arrived(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()

    def attempt(about: dict[str, Any], work: Callable[..., Any], *values: Any) -> None:
        """A row, or what went wrong. After an error inside a kernel nothing else can run, so that ends the script."""
        try:
            found = work(*values)
        except ValueError as failure:  # no room
            found = {"failed": str(failure)}
        for row in found if isinstance(found, list) else [found]:
            rows.append({**about, **row, "after_s": round(time.perf_counter() - began, 1)})
            print(json.dumps(rows[-1]), flush=True)
        text = json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1)
        arguments.out.write_text(text + "\n")

    for name in arguments.shapes:
        shape = SHAPES[name]
        warps = arguments.warps or [None]
        for tokens in () if arguments.no_check else arguments.tokens:
            for count in warps:
                attempt({"shape": name, "tokens": tokens}, checks, shape, tokens, count)
        model = Model(shape, distinct=2)
        for tokens in arguments.tokens:
            for context in arguments.contexts:
                step = Step(model, [context] * tokens)
                about = {"shape": name, "tokens": tokens, "context": context}
                for count in warps:
                    attempt(about, times, model, step, tokens, arguments.stamps, count)
                if tokens <= MOST_SEPARATE and not shape.head_norms and not arguments.no_separate:
                    attempt(about, lambda step=step: {"separate_us": timed(lambda: separate(step))})
                del step
        del model
        torch.cuda.empty_cache()
    os._exit(0)  # without CUDA's own end, which can wait for ever


if __name__ == "__main__":
    main()
