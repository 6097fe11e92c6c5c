"""What the host does in a step, on a GPU: under a model that takes the device hardly any time, a step lasts that long.

    python experiments/serving/host_time.py --model reference --out host_time.txt

For plain decoding and early exit, each in an engine of this process: milliseconds a step at 1 and 8 requests (median of
--repeats), and then the functions of one more run under cProfile, which makes each of them slower.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig
from selfspec_cli.engine.live import Engine, open_engine

TOKENS, REQUESTS, LINES = 128, 8, 70


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(engine: Engine, batch: int) -> float:
    """Milliseconds of each step of one run."""
    done = engine.generate([[5 + number, 6, 7] for number in range(REQUESTS)], TOKENS, batch=batch)
    steps = TOKENS * REQUESTS / batch if done.drafting is None else done.drafting["rounds"]
    return 1000 * done.seconds / steps


def main() -> None:
    given = arguments()
    said = io.StringIO()
    engine = EngineConfig(name="h100", device="cpu" if given.cpu else "cuda", kv_cache_gib=1.0, enforce_eager=given.cpu,
                          gpu_memory_utilization=0.1, max_num_seqs=REQUESTS)  # fmt: skip
    model = ModelConfig(path=given.model, dtype="float32" if given.cpu else "bfloat16", max_model_len=1024)
    for method in (Method.baseline, Method.layer_skip):
        drafting = {} if method is Method.baseline else {"layer": given.layer, "k": given.k}
        with open_engine(RunConfig(model=model, engine=engine, method=method, **drafting)) as live:
            for batch in (1, REQUESTS):
                one(live, batch)
                steps = [one(live, batch) for _ in range(given.repeats)]
                print(f"{method} at {batch}: {statistics.median(steps):.3f} ms a step "
                      f"({min(steps):.3f} to {max(steps):.3f})", file=said)  # fmt: skip
            profile = cProfile.Profile()
            profile.runcall(one, live, 1)
            for order in ("cumulative", "tottime"):
                pstats.Stats(profile, stream=said).strip_dirs().sort_stats(order).print_stats(LINES)
        given.out.write_text(said.getvalue(), encoding="utf-8")
    print("\n".join(line for line in said.getvalue().splitlines() if "ms a step" in line))


if __name__ == "__main__":
    main()
