"""Gated drafting against ungated, and a full grid, on one live engine whose arms take turns prompt by prompt.

    python experiments/confidence_gates/compare.py fixed --layer 3 --setting survival:0.12:12 --out results/gates
    python experiments/confidence_gates/compare.py grid  --layer 3 --setting survival:0.12:12 --out results/gates

    python experiments/confidence_gates/compare.py fixed --model WIDENED --layer 3 --setting survival:0.184:12 ...

`fixed`: plain decoding, every draft length 1 to 8 without a gate, and the settings named, five repeats each.
`idle`: what a gate costs that never closes, and one that closes at once; what the record costs while it is kept.
`grid`: every gate at five thresholds with three draft lengths, screened on a few prompts; the best of them, and the
settings named, then run five repeats on the whole workload. The best of the screening is partly luck, which is why the
comparison is of the second measurement. A setting is gate:threshold:k.

With --model on a GPU the engine is vLLM's there, in bf16. "plain" is then the same engine, whose steps have no places
for drafts; every other arm verifies --longest places. The runs that are published are older: there "plain" did too.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from dataclasses import replace
from pathlib import Path

from selfspec_cli.config import machine
from selfspec_cli.config.schema import EngineConfig, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.live import Engine, open_engine
from selfspec_cli.stages import exits, measure
from selfspec_cli.texts.prompts import workload_prompts

LONGEST, REPEATS = 12, 5
GRID_LENGTHS, GRID_THRESHOLDS = (3, 6, 12), 5


def setting(text: str) -> Setting:
    """gate:threshold:k, such as survival:0.12:12 or none::4."""
    gate, threshold, k = text.split(":")
    return Setting(gate, float(threshold) if threshold else None, int(k))


def race(engine: Engine, cfg: RunConfig, settings: list[Setting]) -> list[dict]:
    """Five repeats, the settings alternating: speedups over plain decoding, and whether every output is the same."""
    prompts = workload_prompts(cfg, engine)
    plain, *others = measure.run(engine, cfg, prompts, [measure.PLAIN, *settings], repeats=REPEATS)
    rows = []
    for arm in [plain, *others]:
        same = sum(ours == theirs for ours, theirs in zip(arm.outputs(), plain.outputs(), strict=True))
        rows.append({"E": cfg.layer, **arm.to_dict(plain), "identical": f"{same} of {len(plain.outputs())}"})
    return rows


def fixed(engine: Engine, cfg: RunConfig, named: list[Setting]) -> dict:
    """Every draft length without a gate, and the settings named."""
    lengths = range(1, min(8, cfg.k or 8) + 1)
    rows = race(engine, cfg, [*(Setting("none", None, k) for k in lengths), *named])
    ungated = max((row for row in rows if row["gate"] == "none" and row["k"]), key=lambda row: row["speedup"])
    gated = [row for row in rows if row["gate"] != "none"]
    if not gated:
        return {"rows": rows, "best_ungated": ungated}
    best = max(gated, key=lambda row: row["speedup"])
    ratios = [ours / theirs for ours, theirs in zip(best["tok_s"], ungated["tok_s"], strict=True)]
    return {"rows": rows, "best_ungated": ungated, "best_gated": best, "gated_over_ungated": ratios,
            "gated_over_ungated_median": best["tok_s_median"] / ungated["tok_s_median"]}  # fmt: skip


def idle(engine: Engine, cfg: RunConfig, named: list[Setting]) -> dict:
    """A gate that never closes and one that closes at once, beside none; and the record."""
    settings = [Setting("none", None, 4), Setting("maxp", 0.0, 4), Setting("none", None, 1), Setting("maxp", 1.0, 4)]
    rows = race(engine, cfg, settings)
    return {"rows": rows, "recorded_over_unrecorded": recording(engine, cfg)}


def recording(engine: Engine, cfg: RunConfig) -> float:
    """Speed with the record on over speed with it off: ungated drafts of 8, alternating, median times of prompts."""
    measure.apply(engine, Setting("none", None, 8))
    on = off = 0.0
    for prompt in workload_prompts(cfg, engine):
        kept, plain = [], []
        for _ in range(REPEATS):
            with engine.recording():
                kept.append(engine.generate([prompt], cfg.workload.output_len, batch=1).seconds)
            plain.append(engine.generate([prompt], cfg.workload.output_len, batch=1).seconds)
        on, off = on + statistics.median(kept), off + statistics.median(plain)
    return off / on


def grid(engine: Engine, cfg: RunConfig, named: list[Setting]) -> dict:
    """Screen every point, then race the best ones with the settings named."""
    log = exits.record(engine, cfg, 16)
    points = [Setting("none", None, k) for k in range(1, 9)]
    points += [Setting(gate, limit, k) for gate in log.features for k in GRID_LENGTHS
               for limit in replay.thresholds(log, gate, GRID_THRESHOLDS)]  # fmt: skip
    few = replace(cfg, workload=replace(cfg.workload, num_prompts=3, output_len=96))
    plain, *screened = measure.run(engine, few, workload_prompts(few, engine), [measure.PLAIN, *points], repeats=1)
    ranked = sorted(screened, key=lambda arm: -arm.median)
    rows = race(engine, cfg, list(dict.fromkeys([arm.setting for arm in ranked[:6]] + named)))
    best = max(rows, key=lambda row: row["speedup"])
    return {"points": len(points), "rows": rows, "best": best,
            "screened": [{"E": cfg.layer, **arm.to_dict(plain)} for arm in ranked]}  # fmt: skip


def main() -> None:
    """Run one of the two and write a JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["fixed", "grid", "idle"], nargs="+")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--setting", type=setting, action="append", default=[])
    parser.add_argument("--longest", type=int, default=LONGEST, help="the engine's k; every draft length is below it")
    parser.add_argument("--model", type=Path, help="folder of a model for a GPU, such as the widened reference model")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cfg = RunConfig(layer=given.layer, k=given.longest, workload=WorkloadConfig())
    if given.model is not None:
        model = ModelConfig(name=given.model.name, path=str(given.model), dtype="bfloat16", exit_layer=None)
        cfg = replace(cfg, model=model, engine=EngineConfig(name="gpu", kv_cache_gib=None))
    with open_engine(cfg) as engine:
        for what in given.what:
            found = {"fixed": fixed, "grid": grid, "idle": idle}[what](engine, cfg, given.setting)
            where = "" if given.model is None else f"_{given.model.name}_k{given.longest}"
            show(found, cfg, given.out / f"{what}_E{given.layer}{where}.json")


def show(found: dict, cfg: RunConfig, file: Path) -> None:
    """Write a JSON file and print its rows."""
    found |= {"device": machine.device(cfg), "versions": machine.versions()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    with file.with_suffix(".csv").open("w", encoding="utf-8", newline="") as table:
        writer = csv.DictWriter(table, [name for name in found["rows"][0] if name != "tok_s"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found["rows"])
    for row in found["rows"]:
        spread = f"{row['speedup']:.3f}x ({row['speedup_min']:.3f} to {row['speedup_max']:.3f})"
        limit = "" if row["threshold"] is None else f"{row['threshold']:g}"
        name = f"E={row['E']} k={row['k']:<3} {row['gate']:<9} {limit:<7}"
        print(f"{name} {row['tok_s_median']:7.1f} tok/s  {spread}  {row['identical']}")
    print({key: value for key, value in found.items() if key.endswith(("_median", "_unrecorded"))}, flush=True)


if __name__ == "__main__":
    main()
