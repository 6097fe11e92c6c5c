"""What low-bit drafts are accepted when a model that was once rounded to 4 bits is first moved off that grid.

    python experiments/views/off_grid.py --model qwen2.5-coder-1.5b --out off_grid.json
    python experiments/views/off_grid.py --model experiments/reference_model/model --out /tmp/off_grid.json --cpu

A checkpoint that comes out of a 4-bit file may be kinder to 4-bit copies than the one it was made of. So the weights
of its linear layers are moved: by Gaussian noise of a part of each row's standard deviation, or by rounding to 8 bits
(one scale a row). Rounding normally distributed weights to 4 bits, a scale and a minimum for 32 of them, moves them by
0.08 of that deviation. Each moved model then drafts for itself, in an engine of its own, and vLLM counts what it
accepts of its own greedy answers. Seeds are fixed. FILE is written after each engine; a second run does the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.scripts import all_among

MOVES = ("as it is", "noise 0.03", "noise 0.1", "8 bits")


def moved(weight: Tensor, move: str, draw: torch.Generator) -> Tensor:
    """A weight [out, in], moved off its grid; in its own dtype, so that a bfloat16 model stays one."""
    if move == "as it is":
        return weight
    whole = weight.float()
    if move == "8 bits":
        scale = whole.abs().amax(dim=1, keepdim=True) / 127
        return (whole / scale).round().mul(scale).to(weight.dtype)
    noise = torch.randn(whole.shape, generator=draw) * whole.std(dim=1, keepdim=True)
    return (whole + float(move.split()[1]) * noise).to(weight.dtype)


def save_moved(model: Path, folder: Path, move: str) -> float:
    """Write `model` with its layers' weights moved; by how much of their length (root mean square)."""
    draw = torch.Generator().manual_seed(0)
    apart = length = 0.0
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name, weight in tensors.items():
            if name.endswith("_proj.weight"):
                tensors[name] = moved(weight, move, draw)
                apart += float((tensors[name].float() - weight.float()).square().sum())
                length += float(weight.float().square().sum())
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    for file in model.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            (folder / file.name).write_bytes(file.read_bytes())
    return (apart / length) ** 0.5


def accepted(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """What an engine over `folder` accepts of its own drafts, for each kind of copies."""
    from selfspec_cli.config.compose import compose_runs
    from selfspec_cli.engine.live import open_engine
    from selfspec_cli.texts.prompts import workload_prompts

    kinds, found = chosen.kinds, {}
    words = [f"model={folder}", f"k={chosen.k}", "engine.enforce_eager=true", "engine.max_num_seqs=16",
             f"workload={chosen.workload}", f"workload.num_prompts={chosen.prompts}",
             f"workload.output_len={chosen.length}", "perplexity_tokens=0"]  # fmt: skip
    words += ["engine=cpu", "model.dtype=float32"] if chosen.cpu else ["engine=h100", "engine.kv_cache_gib=4",
                                                                       "model.max_model_len=2048"]  # fmt: skip
    runs = [compose_runs(None, [*words, f"draft_weights={kind}"])[0] for kind in kinds]
    with open_engine(runs[0]) as engine:  # eager, so that the view can be changed while it lives
        prompts = workload_prompts(runs[0], engine)
        for kind, cfg in zip(kinds, runs, strict=True):
            engine.set_view(cfg)
            made = engine.generate(prompts, chosen.length, batch=min(16, len(prompts)))
            counts = made.verified
            assert counts is not None
            found[kind] = {
                "rounds": counts.rounds, "drafted": made.drafted, "accepted": counts.accepted,
                "share": round(counts.accepted / max(made.drafted, 1), 4),
                "tokens_a_round": round(1 + counts.accepted / max(counts.rounds, 1), 3),
                "accepted_at": counts.accepted_at,
            }  # fmt: skip
    return found


def main() -> None:
    """Every move that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a checkpoint in safetensors")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--moves", type=all_among(MOVES, "move"), default=",".join(MOVES), help="of: " + ", ".join(MOVES)
    )
    parser.add_argument(
        "--kinds", type=all_among(DRAFT_WEIGHTS, "kind of copies"), default="int4,int8", help="of copies"
    )
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--workload", default="coding")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    found = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    for move in chosen.moves:
        if move in found:
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            distance = save_moved(chosen.model, Path(scratch), move)
            found[move] = {"moved_by": round(distance, 5), **accepted(Path(scratch), chosen)}
        found[move]["seconds"] = round(time.perf_counter() - start, 1)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(move, found[move], flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
