"""Where the time of a round goes on a GPU: a table from a profiler trace, beside what the cost model allows.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python experiments/gpu_trace.py --out results/published/gpu [--batch 1]

Llama-3-8B shape, random weights, E=8, k=3, acceptance length 3.0. The profiler slows the host, so the idle share is an
upper bound; what kernels take is not affected. The engine must be in this process, or the profiler does not see it. The
draft loop is traced twice, as it is (one conditional node of a CUDA graph) and as k steps captured one after the other,
which take the same time (results/LOG.md). Of the first the profiler knows no launch: its kernels come under "other".
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from unittest import mock

import torch

from selfspec_cli.config.keys import baseline_of
from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.live import open_engine
from selfspec_cli.report.trace import shares
from selfspec_cli.texts.prompts import workload_prompts
from selfspec_cli.vllm_plugin.v2 import device_loop

MODEL = ModelConfig(
    name="llama3_8b_shape", path="shape:llama3_8b", dtype="bfloat16", load_format="dummy", max_model_len=4096
)
# A second engine in one process finds less memory free than vLLM asks for by default.
ENGINE = EngineConfig(
    name="h100", kv_cache_gib=None, gpu_memory_utilization=0.4, max_num_seqs=32, max_num_batched_tokens=8192
)
KERNELS = 12  # of a part, the slowest


def table(cfg: RunConfig) -> dict:
    """Profile about 60 rounds of one arm."""
    with open_engine(cfg) as engine:
        prompts = workload_prompts(cfg, engine)
        engine.generate(prompts, 64, batch=cfg.workload.batch)
        plain = engine.generate(prompts, 192, batch=cfg.workload.batch)
        engine.call("early_exit_annotate")
        with torch.profiler.profile() as p:
            engine.generate(prompts, 192, batch=cfg.workload.batch)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        p.export_chrome_trace(path)
        parts, wall, rounds = shares(json.loads(Path(path).read_text())["traceEvents"])
    return {
        "arm": cfg.method.value,
        "batch": cfg.workload.batch,
        "rounds": rounds,
        "wall_us_profiled": round(wall, 1),
        "tok_s_unprofiled": round(plain.tokens_per_second, 1),
        "parts": [
            {
                "part": share.part,
                "busy": round(share.busy, 2),
                "launches": round(share.launches, 2),
                "kernels": [
                    {"name": name[:120], "busy": round(busy, 2), "times": round(times, 2)}
                    for name, (busy, times) in list(share.kernels.items())[:KERNELS]
                ],
            }
            for share in parts
        ],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--batch", type=int, default=1)
    chosen = options.parse_args()
    work = WorkloadConfig(
        "decode", input_len=32, output_len=200, num_prompts=chosen.batch, batch=chosen.batch, prompts="random"
    )
    drafting = RunConfig(
        model=MODEL, engine=ENGINE, workload=work, method=Method.layer_skip, layer=8, k=3, acceptance_length=3.0,
        perplexity_tokens=0,
    )  # fmt: skip
    found = [table(cfg) for cfg in (baseline_of(drafting), drafting)]
    with mock.patch.object(device_loop, "unavailable", return_value="it was asked for"):
        found.append({**table(drafting), "arm": "layer_skip, unrolled"})
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"trace_batch{chosen.batch}.json").write_text(json.dumps(found, indent=1) + "\n")
    for arm in found:
        print(f"{arm['arm']}: {arm['wall_us_profiled']} us a round (profiled), {arm['tok_s_unprofiled']} tok/s (not)")
        for part in arm["parts"]:
            print(f"  {part['part']:8} {part['busy']:9.1f} us  {part['launches']:6.1f} launches")
            for kernel in part["kernels"]:
                print(f"    {kernel['busy']:9.1f} us  {kernel['times']:6.1f} x  {kernel['name'][:80]}")


if __name__ == "__main__":
    main()
