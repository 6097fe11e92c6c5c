"""What the host does in a step, on a GPU: under a model that takes the device hardly any time, a step lasts that long.

    python experiments/serving/host_time.py --model reference --out host_time.txt

For plain decoding, early exit that drafts nothing (by its table of lengths), and early exit, each in an engine of this
process: milliseconds a step at 1 and --requests requests (median of --repeats), and then two more runs of one request:
the functions of one under cProfile, which makes each of them slower, and the operators and kernels of the other.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig
from selfspec_cli.engine.live import Engine, open_engine

TOKENS, LINES = 128, 70
ARMS: dict[str, dict[str, Any]] = {"baseline": {}, "no drafts": {"length_table": "1:0"}, "early exit": {}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(engine: Engine, requests: int) -> float:
    """Milliseconds of each step of one run, in which so many requests begin and end together."""
    done = engine.generate([[5 + number, 6, 7] for number in range(requests)], TOKENS, batch=requests)
    return 1000 * done.seconds / ((done.drafting or {}).get("rounds") or TOKENS)


def main() -> None:
    given = arguments()
    said = io.StringIO()
    engine = EngineConfig(name="h100", device="cpu" if given.cpu else "cuda", kv_cache_gib=1.0, enforce_eager=given.cpu,
                          gpu_memory_utilization=0.1, max_num_seqs=given.requests)  # fmt: skip
    model = ModelConfig(path=given.model, dtype="float32" if given.cpu else "bfloat16", max_model_len=1024)
    for name, more in ARMS.items():
        method = Method.baseline if name == "baseline" else Method.layer_skip
        drafting = {} if method is Method.baseline else {"layer": given.layer, "k": given.k, **more}
        with open_engine(RunConfig(model=model, engine=engine, method=method, **drafting)) as live:
            for requests in (1, given.requests):
                one(live, requests)
                steps = [one(live, requests) for _ in range(given.repeats)]
                print(f"{name} at {requests}: {statistics.median(steps):.3f} ms a step "
                      f"({min(steps):.3f} to {max(steps):.3f})", file=said)  # fmt: skip
            functions = cProfile.Profile()
            functions.runcall(one, live, 1)
            for order in ("cumulative", "tottime"):
                pstats.Stats(functions, stream=said).strip_dirs().sort_stats(order).print_stats(LINES)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as operators:
                one(live, 1)
            print(operators.key_averages().table(sort_by="cpu_time_total", row_limit=LINES,
                                                 max_name_column_width=90), file=said)  # fmt: skip
        given.out.write_text(said.getvalue(), encoding="utf-8")
    print("\n".join(line for line in said.getvalue().splitlines() if "ms a step" in line))


if __name__ == "__main__":
    main()
