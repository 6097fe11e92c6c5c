r"""Draft lengths by load on a GPU, over vLLM without early exit: off by table, by length, by request and by acceptance.

    python experiments/lengths/load_on_gpu.py --model ./reference_widened --layer 3 --k 4 --out lengths_widened.json
    python experiments/lengths/load_on_gpu.py --model shape:llama3_8b --layer 8 --k 3 --arms plain,adaptive \
        --out lengths_8b.json

Engines one after the other; each takes every load (1 to 256 requests at once):

plain     vLLM without early exit: what all others are divided by.
fixed     an engine with decode graphs for every length: no drafts because no request wants any ("off by request"), and
          every fixed length, alternating. From these `selfspec tune`'s own code makes a table.
table     that table, followed; beside the best fixed length of the engine before, at each load.
off       drafts off by the table at some loads and by the context of the requests at the others.
adaptive  random tokens as prompts, and lengths by acceptance. With random weights nothing is accepted.
again     plain once more: how far the machine's pace moved in between.

Times begin when the last request has its first token. Ratios are of medians over repeats; the wanted ones are at least
0.99 for off, 0.98 of the best fixed length for the table, 0.97 for adaptive where nothing is accepted. The file is
written after each engine, and a second run with the same file does only what is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if "--cpu" in sys.argv:  # on a GPU each engine has a process of its own, which gives all of its memory back
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from selfspec_cli.config import machine
from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.length_table import Cell, LengthTable
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.live import Engine, Generation, open_engine
from selfspec_cli.scripts import all_among, numbers
from selfspec_cli.stages import loads, measure
from selfspec_cli.texts.prompts import workload_prompts

ARMS = ("plain", "fixed", "table", "off", "adaptive", "again")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--loads", type=numbers, default="1,8,32,64,128,256")
    parser.add_argument("--arms", type=all_among(ARMS, "arm"), default=",".join(ARMS))
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU: reference model, fp32, eager")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def config(given: argparse.Namespace) -> RunConfig:
    shape = given.model.startswith("shape:")
    model = ModelConfig(name=given.model, path=given.model, dtype="float32" if given.cpu else "bfloat16",
                        load_format="dummy" if shape else "auto", max_model_len=1024)  # fmt: skip
    work = WorkloadConfig(prompts="random" if shape else "heldout", input_len=32, output_len=given.output_len)
    engine = EngineConfig(name="cpu", enforce_eager=True, max_num_seqs=max(given.loads)) if given.cpu else EngineConfig(
        name="gpu", device="cuda", kv_cache_gib=given.kv_gib, max_num_seqs=max(given.loads), max_num_batched_tokens=8192
    )  # fmt: skip
    return RunConfig(model=model, workload=work, engine=engine, layer=given.layer, k=given.k)


def decoding(done: Generation) -> float:
    """Seconds a generated token of one request, once all requests have their first."""
    start = max(request.events[0] for request in done.requests)
    return (done.seconds - start) / (len(done.outputs[0]) - 1)


def at_load(cfg: RunConfig, requests: int, **changes: Any) -> RunConfig:
    return replace(cfg, workload=replace(cfg.workload, batch=requests, num_prompts=requests, **changes))


def times(engine: Engine, cfg: RunConfig, settings: dict[str, Setting], repeats: int) -> dict[str, dict[str, Any]]:
    """The settings, alternating: seconds a token, and what was drafted and accepted."""
    prompts, work = workload_prompts(cfg, engine), cfg.workload
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in settings}
    for turn in range(repeats + 1):  # the first is for warming up
        for name, setting in settings.items():
            if setting is not measure.AS_FOUND:
                measure.apply(engine, setting)
            done = engine.generate(prompts, work.output_len, batch=work.batch)
            if turn:
                found[name]["seconds"].append(decoding(done))
            if turn == repeats and done.verified is not None:
                drafted = done.drafting["drafted"] if done.drafting else None
                found[name] |= {"rounds": done.verified.rounds, "places": done.verified.places,
                                "accepted": done.verified.accepted, "drafted": drafted}  # fmt: skip
    for row in found.values():
        row["median"] = statistics.median(row["seconds"])
    return found


def each_load(
    cfg: RunConfig, at: list[int], settings: dict[str, Setting], repeats: int, **changes: Any
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    began = time.perf_counter()
    with open_engine(cfg) as engine:
        print(f"    engine up after {time.perf_counter() - began:.0f} s", flush=True)
        for requests in at:
            yield requests, times(engine, at_load(cfg, requests, **changes), settings, repeats)


def made_table(rows: dict[str, Any], k: int) -> LengthTable:
    """The table of the fixed lengths, by the code that `selfspec tune` uses."""
    found = []
    for requests, arms in rows["fixed"].items():
        plain = arms["off by request"]
        name, best = min(((name, row) for name, row in arms.items() if name != "off by request"),
                         key=lambda item: item[1]["median"])  # fmt: skip
        length = int(name.removeprefix("k="))
        if plain["median"] < loads.GAIN * best["median"]:
            found.append(loads.Load(int(requests), measure.PLAIN, None, []))
            continue
        tokens = 1 + best["accepted"] / best["rounds"]
        cost = max(0.0, tokens * best["median"] / plain["median"] - 1)
        found.append(loads.Load(int(requests), Setting("none", None, length), round(cost, 3), []))
    return loads.table(found, Setting("none", None, k))


def off_table(at: list[int], k: int) -> LengthTable:
    """No drafts at any load: by the table at every second one, by every request's context at the others."""
    cells, before = [], 0
    for number, requests in enumerate(at):
        start = 1 if not before else math.ceil(math.sqrt(before * requests))
        cells += [Cell(start, 0, 0)] if number % 2 else [Cell(start, 0, k), Cell(start, 16, 0)]
        before = requests
    return LengthTable(tuple(cells))


def run(given: argparse.Namespace, rows: dict[str, Any], save: Any) -> None:
    cfg, at = config(given), given.loads
    drafting = replace(cfg, length_table=loads.every_width(given.k))
    fixed = {"off by request": measure.PLAIN} | {f"k={k}": Setting("none", None, k) for k in loads.lengths(given.k)}
    found = {"as found": measure.AS_FOUND}
    for arm in given.arms:
        if arm in rows:
            continue
        if arm in ("plain", "again"):
            chosen, settings, changes = replace(cfg, method=Method.baseline, k=None, layer=None), found, {}
        elif arm == "fixed":
            chosen, settings, changes = drafting, fixed, {}
        elif arm == "table":
            chosen, settings, changes = replace(cfg, length_table=str(made_table(rows, given.k))), found, {}
        elif arm == "off":
            chosen, settings, changes = replace(cfg, length_table=str(off_table(at, given.k))), found, {}
        else:
            table = str(made_table(rows, given.k)) if "fixed" in rows else None
            chosen = replace(cfg, length_table=table, adaptive_length=True)
            settings, changes = found, {"prompts": "random"}
        print(f"{arm}: {chosen.length_table or ''}", flush=True)
        done = {}
        for requests, arms in each_load(chosen, at, settings, given.repeats, **changes):
            done[str(requests)] = arms
            for name, row in arms.items():
                print(f"  {requests:4} {name:15} {1e3 * row['median']:8.3f} ms a token  {over(rows, requests, row)}",
                      flush=True)  # fmt: skip
        rows[arm] = done
        rows[f"{arm} table"] = chosen.length_table
        save()


def over(rows: dict[str, Any], requests: int, row: dict[str, Any]) -> str:
    """The speed over plain vLLM, where that is known."""
    plain = rows.get("plain", {}).get(str(requests))
    return f"{plain['as found']['median'] / row['median']:.3f}x plain" if plain else ""


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Ratios of speeds at each load: over plain vLLM, and of the table over the best fixed length."""
    said: dict[str, Any] = {}
    for requests in rows.get("plain", {}):
        plain = rows["plain"][requests]["as found"]["median"]
        line = {arm: plain / rows[arm][requests]["as found"]["median"] for arm in ("table", "off", "adaptive", "again")
                if arm in rows}  # fmt: skip
        if "fixed" in rows:
            arms = rows["fixed"][requests]
            line["off by request"] = plain / arms["off by request"]["median"]
            best = min(row["median"] for row in arms.values())
            line["best fixed"] = plain / best
            if "table" in rows:
                line["table over best fixed"] = best / rows["table"][requests]["as found"]["median"]
        said[requests] = {name: round(value, 4) for name, value in line.items()}
    return said


def main() -> None:
    given = arguments()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {"rows": {}}

    def save() -> None:
        found["summary"] = summary(found["rows"])
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    found |= {"device": machine.device(config(given)), "versions": machine.versions(), "arguments": vars(given) | {
        "out": str(given.out)}}  # fmt: skip
    run(given, found["rows"], save)
    save()
    for requests, line in found["summary"].items():
        print(requests, line)


if __name__ == "__main__":
    main()
