"""Time the fit of exit heads on a GPU, without Hydra: how long from a started engine to a saved head.

    python experiments/fit_on_gpu.py
        Llama-3-8B shape, dummy weights, random token ids
    python experiments/fit_on_gpu.py --model reference --quantization fp8 --layers 12 --heads lens lsq translator
        the embedded model, quantised to FP8 at load

What is measured: collecting --pairs pairs (hidden states of every layer asked for, streamed into fp64 normal
equations), then solving, choosing the ridge, testing and saving. The ceiling at 8B shape is memory (8 * hidden *
vocabulary bytes for the sums, half as much for a head) and fp64 arithmetic (2 * hidden^2 * vocabulary a ridge for the
solve, as much again for its residual). Dummy weights and random ids time the fit; they say NOTHING about agreement.

Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from selfspec_cli.early_exit.heads import HEADS

SHAPE = "shape:llama3_8b"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHAPE, help="shape:llama3_8b (dummy weights), reference, or a folder")
    parser.add_argument("--quantization", help="such as fp8, done by vLLM as it loads")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--heads", nargs="+", choices=tuple(HEADS), default=["lens", "lsq"])
    parser.add_argument("--vocab", nargs="+", default=["full"], help="draft vocabularies, such as full 32768")
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--ridge", type=float, help="relative; chosen where not given")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out", default="", help="folder for the heads; a temporary one")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.tensor_parallel_size == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that this process sees the device's memory
    from selfspec_cli.config.schema import EngineConfig, ModelConfig, RunConfig
    from selfspec_cli.stages import fit

    with tempfile.TemporaryDirectory() as scratch:
        model = ModelConfig(dtype="bfloat16", quantization=given.quantization, exit_layer=None)
        model = replace(model, tensor_parallel_size=given.tensor_parallel_size)
        dummy = given.model.startswith("shape:")
        if given.model != "reference":
            name = given.model.replace("shape:", "").rstrip("/").rpartition("/")[2]
            model = replace(model, name=name, path=given.model, load_format="dummy" if dummy else "auto")
        cfg = RunConfig(
            model=model,
            engine=EngineConfig(name="gpu", kv_cache_gib=None, max_num_batched_tokens=8192),
            head_dir=given.out or str(Path(scratch) / "heads"),
        )
        done = fit.run(
            cfg, layers=given.layers, heads=given.heads, pairs=given.pairs, ridge=given.ridge, progress=say,
            corpus="random" if dummy else "stdlib", vocabularies=tuple(given.vocab), timed=1,
        )  # fmt: skip
    import torch

    for found in done.reports:
        print({key: found.get(key) for key in ("layer", "head", "vocab", "agreement", "ridge", "condition", "head_us")})
    print(json.dumps({
        "model": given.model,
        "quantization": given.quantization,
        "weights": "dummy; token ids random: agreement means nothing" if dummy else "real",
        "layers": given.layers,
        "heads": given.heads,
        "pairs": given.pairs,
        "collect_s": round(done.collect_seconds, 2),
        "solve_test_save_s": round(done.solve_seconds, 2),
        "after_engine_start_s": round(done.collect_seconds + done.solve_seconds, 2),
        "peak_device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }))  # fmt: skip


def say(what: str, done: int, total: int) -> None:
    """Progress as plain lines."""
    print(f"{what}: {done} of {total}", flush=True)


if __name__ == "__main__":
    main()
