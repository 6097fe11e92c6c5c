"""What a gate costs on a GPU when it saves nothing, and what a round costs when it stops at once. Llama-3-8B shape.

    python experiments/confidence_gates/cost_on_gpu.py --out results/gates/cost_on_gpu.json
    python experiments/confidence_gates/cost_on_gpu.py --tensor-parallel 2 --engines loop,unrolled --out two_gpus.json

Dummy weights, E=8 of 32, k=3, synthetic acceptance. Three engines: plain decoding; the draft loop that ends on the
device, on which gates and draft lengths then change live, taking turns; the draft loop unrolled into k steps (what a
captured graph is without conditional nodes). The file is written after each batch size of an engine.
Times are milliseconds a step or round after the first token, medians.

The ceilings: a gate that never closes should cost nothing; a gate that closes at once should leave a plain step and one
draft step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

from selfspec_cli.config import machine
from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.engine.live import Engine, Generation, open_engine
from selfspec_cli.record import latency
from selfspec_cli.scripts import all_among
from selfspec_cli.vllm_plugin.v2.device_loop import SWITCH

NEVER = {"maxp": 0.0, "varH": 1e9, "entropy": 1e9, "margin": 0.0, "survival": 0.0}  # AdaEDL's bound may be negative
K, BATCHES, INPUT_LEN, OUTPUT_LEN = 3, (1, 32), 128, 200
ENGINES = ("plain", "loop", "unrolled")
UNROLLED = f"unrolled k={K}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama3_8b")
    parser.add_argument("--layer", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--draft-weights", choices=tuple(DRAFT_WEIGHTS), default="shared")
    parser.add_argument(
        "--engines",
        type=all_among(ENGINES, "engine"),
        default=",".join(ENGINES),
        help="which of the three, and in which order",
    )
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU: reference model, two engines")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def config(given: argparse.Namespace) -> RunConfig:
    if given.cpu:
        return RunConfig(layer=given.layer, k=K, draft_weights=given.draft_weights)
    model = ModelConfig(
        name="llama3_8b", path=given.model, load_format="dummy", dtype="bfloat16", exit_layer=None,
        tensor_parallel_size=given.tensor_parallel,
    )  # fmt: skip
    # Half of the memory: engines in one process leave weights behind (results/LOG.md).
    engine = EngineConfig(
        name="gpu", kv_cache_gib=None, gpu_memory_utilization=0.5, max_num_batched_tokens=8192, max_num_seqs=64
    )
    drafting = {"layer": given.layer, "k": K, "draft_weights": given.draft_weights, "acceptance_length": 3.0}
    return RunConfig(model=model, engine=engine, **drafting)


def milliseconds(done: Generation) -> float:
    """A step of the batch, or a round that was verified, after the prefill."""
    steps = len(done.outputs[0]) - 1 if done.verified is None else done.verified.rounds / len(done.outputs)
    return 1e3 * (done.seconds - max(map(latency.ttft, done.requests))) / steps


def measure(
    engine: Engine, arms: dict[str, tuple[str, float | None, int]], repeats: int, batch: int
) -> dict[str, dict]:
    """Every arm at one batch size, alternating; an arm is a gate, its threshold and a draft length."""
    found: dict[str, dict] = {}
    prompts = [[(7 * row + place) % 997 + 3 for place in range(INPUT_LEN)] for row in range(batch)]
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):  # the first is for warming up
        for name, (gate, threshold, k) in arms.items():
            if engine.cfg.method is Method.layer_skip:
                engine.set_gate(gate, threshold)
                engine.set_draft_length(k)
            done = engine.generate(prompts, OUTPUT_LEN, batch=batch)
            if turn:
                times[name].append(milliseconds(done))
            if turn == repeats and done.drafting is not None:
                lengths = done.drafting["length_histogram"]
                found.setdefault(f"{name} batch {batch}", {})["draft_steps_histogram"] = lengths
    for name, values in times.items():
        row = found.setdefault(f"{name} batch {batch}", {})
        row |= {"ms": statistics.median(values), "ms_all": [round(value, 4) for value in values]}
        print(f"{name:24} batch {batch:3} {row['ms']:8.3f} ms", flush=True)
    return found


def ratios(rows: dict[str, dict]) -> dict[str, float]:
    """What the times say beside each other, of the engines that there are."""
    found = {}
    for batch in BATCHES:
        ms = {name.removesuffix(f" batch {batch}"): row["ms"] for name, row in rows.items()
              if name.endswith(f" batch {batch}")}  # fmt: skip
        if f"k={K}" not in ms:
            continue
        draft = (ms[f"k={K}"] - ms["k=1"]) / (K - 1)
        found |= {f"{gate} that never closes / none, batch {batch}": ms[f"never closes {gate}"] / ms[f"k={K}"]
                  for gate in NEVER}  # fmt: skip
        found[f"closes at once / none, batch {batch}"] = ms["closes at once"] / ms[f"k={K}"]
        if "plain" in ms:
            found[f"closes at once / (plain step + draft step), batch {batch}"] = ms["closes at once"] / (
                ms["plain"] + draft
            )
        if UNROLLED in ms:
            found[f"loop / unrolled, batch {batch}"] = ms[f"k={K}"] / ms[UNROLLED]
    return found


def main() -> None:
    given = arguments()
    cfg = config(given)
    plain = replace(cfg, method=Method.baseline, k=None, layer=None, acceptance_length=None, draft_weights="shared")
    live = {f"k={k}": ("none", None, k) for k in (1, 2, K)}
    live |= {f"never closes {gate}": (gate, threshold, K) for gate, threshold in NEVER.items()}
    live |= {"closes at once": ("maxp", 1.0, K)}
    closing = {UNROLLED: ("none", None, K), "unrolled, closes at once": ("maxp", 1.0, K)}
    known = {"plain": (plain, {"plain": ("none", None, 0)}), "loop": (cfg, live), "unrolled": (cfg, closing)}
    rows: dict[str, dict] = {}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.engines:
        wanted, arms = known[name]
        os.environ[SWITCH] = "0" if name == "unrolled" else "1"  # also of the processes of other ranks
        with open_engine(wanted) as engine:
            for batch in BATCHES:
                rows |= measure(engine, arms, given.repeats, batch)
                found = {"rows": rows, "ratios": ratios(rows), "device": machine.device(cfg),
                         "versions": machine.versions(),
                         "asked": {key: str(value) for key, value in vars(given).items()}}  # fmt: skip
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, value in ratios(rows).items():
        print(f"{name}: {value:.4f}", flush=True)
    os._exit(0)  # ranks of a tensor-parallel engine may take long to end


if __name__ == "__main__":
    main()
