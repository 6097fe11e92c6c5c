"""Where the time of a draft step goes: what each phase of the kernel for a whole trunk takes, by its own clocks.

    python experiments/kernels/step_stamps.py --out step_stamps.json --shapes qwen2.5_1.5b --tokens 1 4

A build with `-DSTAMPS` writes when each warp reaches each point of each layer. Nanoseconds of the card tick coarsely
and clocks are those of one multiprocessor, so clocks are used, and set to the card's time by all stamps of a block.
Beside it the times of whole steps of builds in which nobody waits for another block (`ANSWERED`) and in which no
weights are read (`DRY`): what remains without one of them is not due to it.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fused_step import PATIENCE, SHAPES, Fused, Model, Step, timed
from torch import Tensor

POINTS = 20  # of a layer; exchange.cu
PHASES = ("qkv", "o", "gate_up", "down")
PARTS = ("attend", "take", "multiply", "barrier", "write")
"""Of a phase, each up to the next point. `take`: waits for the words of other blocks and rounds them to bytes."""
VARIANTS: dict[str, list[str]] = {
    "whole": [],
    "answered": ["-DANSWERED"],
    "dry": ["-DDRY"],
    "answered_dry": ["-DANSWERED", "-DDRY"],
}


def stamps_of(fused: Fused, step: Step) -> Tensor:
    """Microseconds since the first stamp, float64 [blocks, warps, layers, POINTS], of the last of three steps."""
    build = fused.kernel.build
    shape = (len(build.plan.blocks), build.plan.warps, build.shape.layers, POINTS)
    buffer = torch.zeros(shape, dtype=torch.int64, device="cuda")
    run = fused.bind(step, stamps=buffer)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    stamps = buffer.cpu()
    clocks, card = stamps & 0xFFFFFFFF, stamps >> 32 & 0xFFFFFFFF
    clocks, card = (_unwrapped(count) for count in (clocks, card))
    flat_clocks, flat_card = clocks.flatten(1).double(), card.flatten(1).double()
    rate = _slope(flat_clocks, flat_card)  # nanoseconds a clock
    # The card's time of a tick is read after it: the least difference is the true one.
    offset = (flat_card - flat_clocks * rate).amin(1)
    times = clocks.double() * rate + offset.view(-1, 1, 1, 1)
    return (times - times.min()) / 1000


def _unwrapped(count: Tensor) -> Tensor:
    """A count of 32 bits without its overflow within the buffer."""
    return torch.where(count < count.max() - 2**31, count + 2**32, count)


def _slope(x: Tensor, y: Tensor) -> float:
    slopes = []
    for a, b in zip(x, y, strict=True):
        a, b = a - a.mean(), b - b.mean()
        slopes.append(float((a * b).sum() / a.square().sum()))
    return sorted(slopes)[len(slopes) // 2]


def phases(times: Tensor) -> list[dict[str, Any]]:
    """A row for each phase, microseconds of a layer (mean over layers but the first and last).

    For each part the mean over warps, and the most of any warp; `last`: from the last warp that begins to write in the
    phase before to the last one that has what it needs in this; `spread`: from the first block to the last to end.
    """
    inner = times[:, :, 1:-1]
    rows = []
    following = torch.cat([inner[..., 1:], times[:, :, 2:, :1]], 3)
    spent = following - inner
    for number, name in enumerate(PHASES):
        row: dict[str, Any] = {"phase": name}
        for at, part in enumerate(PARTS):
            point = number * 5 + at
            one = spent[..., point]
            row[part] = round(float(one.mean()), 3)
            row[part + "_most"] = round(float(one.amax((0, 1)).mean()), 3)
        ends = following[..., number * 5 + 4].amax(1)  # of blocks
        row["end_spread"] = round(float((ends.amax(0) - ends.amin(0)).mean()), 3)
        ready = inner[..., number * 5 + 2]
        row["ready_first"] = round(float((ready.amin((0, 1)) - inner[..., 0].amin((0, 1))).mean()), 3)
        row["ready_last"] = round(float((ready.amax((0, 1)) - inner[..., 0].amin((0, 1))).mean()), 3)
        row["ends_last"] = round(float((ends.amax(0) - inner[..., 0].amin((0, 1))).mean()), 3)
        rows.append(row)
    return rows


def main() -> None:
    """Print a table for each shape and number of tokens, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("step_stamps.json"))
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5_1.5b"], choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="as many layers, in place of the shape's")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    found = []
    for name in arguments.shapes:
        shape = SHAPES[name]
        model = Model(replace(shape, layers=arguments.layers or shape.layers))
        for tokens in arguments.tokens:
            step = Step(model, [arguments.context] * tokens)
            row: dict[str, Any] = {"shape": name, "layers": model.shape.layers, "tokens": tokens}
            for variant, options in VARIANTS.items():
                PATIENCE[:] = options
                fused = Fused(model, tokens)
                row[variant] = timed(fused.bind(step))
                del fused
            PATIENCE[:] = ["-DSTAMPS"]
            fused = Fused(model, tokens)
            row["phases"] = phases(stamps_of(fused, step))
            print(json.dumps({key: value for key, value in row.items() if key != "phases"}), flush=True)
            for phase in row["phases"]:
                print("   ", json.dumps(phase), flush=True)
            found.append(row)
            written = {"device": torch.cuda.get_device_name(), "rows": found}
            arguments.out.write_text(json.dumps(written, indent=1) + "\n")
            del fused, step
        del model
    os._exit(0)  # without CUDA's own end, which can wait for ever


if __name__ == "__main__":
    main()
