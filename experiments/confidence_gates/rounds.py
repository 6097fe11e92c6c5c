"""Where the time of a round goes, and what the best of all gates could gain by it (CPU, batch 1).

    python experiments/confidence_gates/rounds.py --layer 3 --setting survival:0.123:12 --out results/gates

Arms take turns prompt by prompt: draft lengths 0 to 12 without a gate, the setting named, and `forced`, which drafts
just as long as that setting did in every round, without asking a gate. So gated - forced is what the gate costs, and
forced - ungated what uneven lengths cost. Before that, a draft of 12 is logged from every position of the model's own
greedy output. Over those the rounds of any setting can be laid exactly as they would run, each at the median time that
a verify pass over so many tokens, and so many draft steps, took: what the best setting gains, were its gate free, were
verifying another token a straight line. Written: rounds_E3.json, verify_E3.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import LONGEST, setting

from selfspec_cli.config import machine
from selfspec_cli.config.schema import RunConfig, WorkloadConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.live import Engine, open_engine
from selfspec_cli.stages import measure
from selfspec_cli.texts.prompts import workload_prompts

PARTS = ("step", "execute", "model", "propose", "d_forward", "d_logits", "d_gate")


@dataclass
class Watch:
    """Times parts of every engine step: a dict of seconds a step, with `tokens` verified and `drafts` made."""

    steps: list[dict[str, float]] = field(default_factory=list)
    now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lengths: list[int] = field(default_factory=list)  # of the drafts made so far
    forced: list[int] | None = None  # lengths to draft, in place of the setting's

    def time(self, owner: Any, name: str, part: str) -> None:
        """Add the time of every call of `owner.name` to `part`."""
        called: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return called(*args, **named)
            finally:
                self.now[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    def attach(self, engine: Engine) -> None:
        """Begin to watch."""
        outer = engine.llm.llm_engine
        worker = outer.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        drafter = runner.drafter
        execute, propose, step = runner.execute_model, drafter.propose, outer.step

        def noted(scheduled: Any, *args: Any, **named: Any) -> Any:
            self.now["tokens"] = scheduled.total_num_scheduled_tokens
            return execute(scheduled, *args, **named)

        def proposing(*args: Any, **named: Any) -> Any:
            if self.forced is not None:
                drafter.draft_length = self.forced.pop(0) if self.forced else 0
            drafts = propose(*args, **named)
            self.now["drafts"] = len(drafts[0]) if drafts else 0
            self.lengths.append(int(self.now["drafts"]))
            return drafts

        def stepping() -> Any:
            self.now = defaultdict(float)
            began = time.perf_counter()
            outputs = step()
            self.now["step"] = time.perf_counter() - began
            self.steps.append(dict(self.now))
            return outputs

        runner.execute_model, drafter.propose, outer.step = noted, proposing, stepping
        self.time(runner, "execute_model", "execute")
        self.time(runner, "_model_forward", "model")
        self.time(drafter, "propose", "propose")
        self.time(drafter, "_forward", "d_forward")
        self.time(drafter.head, "logits", "d_logits")
        self.time(drafter.gate, "decide", "d_gate")


def run_arms(engine: Engine, cfg: RunConfig, named: Setting, repeats: int) -> dict[str, list[list[list[dict]]]]:
    """Timed steps by arm, prompt and repeat; the prefill step is left out."""
    watch = Watch()
    watch.attach(engine)
    plan = {"gated": named, "forced": Setting("none", None, named.k)}
    plan |= {f"k={k}": Setting("none", None, k) for k in range(LONGEST + 1)}
    found: dict[str, list[list[list[dict]]]] = {name: [] for name in plan}
    for place, prompt in enumerate(workload_prompts(cfg, engine)):
        for name in plan:
            found[name].append([])
        measure.apply(engine, named)
        watch.lengths.clear()
        engine.generate([prompt], cfg.workload.output_len, batch=1)
        lengths = list(watch.lengths)
        for number in range(repeats):
            for name in list(plan) if (place + number) % 2 else reversed(list(plan)):
                measure.apply(engine, plan[name])
                watch.forced = list(lengths) if name == "forced" else None
                watch.steps.clear()
                engine.generate([prompt], cfg.workload.output_len, batch=1)
                watch.forced = None
                found[name][-1].append([step for step in watch.steps[1:] if step.get("tokens")])
    return found


def in_a_round(runs: list[list[list[dict]]]) -> dict[str, float]:
    """Microseconds of each part in the mean round; every round takes the median of its repeats."""
    rounds = [step for repeats in runs for step in zip(*repeats, strict=True)]
    parts = {part: 1e6 * statistics.mean(statistics.median(s.get(part, 0.0) for s in steps) for steps in rounds)
             for part in PARTS}  # fmt: skip
    drafted = statistics.mean(steps[0].get("drafts", 0) for steps in rounds)
    return {"rounds": len(rounds), "drafted": drafted, "rest": parts["step"] - parts["propose"], **parts}


def by_size(found: dict[str, list[list[list[dict]]]]) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Median times of the ungated arms: rows of microseconds, seconds of a step less its drafting by tokens verified,
    and seconds of drafting by draft length."""
    verify, draft = defaultdict(list), defaultdict(list)
    for name, runs in found.items():
        for step in (step for repeats in runs for steps in repeats for step in steps if name.startswith("k=")):
            verify[int(step["tokens"])].append(step)
            draft[int(step.get("drafts", 0))].append(step["propose"])
    rows = [{"tokens_verified": tokens, "steps": len(steps),
             "model_us": 1e6 * statistics.median(s["model"] for s in steps),
             "all_but_drafting_us": 1e6 * statistics.median(s["step"] - s["propose"] for s in steps),
             "drafts": tokens - 1, "drafting_us": 1e6 * statistics.median(draft[tokens - 1])}
            for tokens, steps in sorted(verify.items()) if tokens <= LONGEST + 1]  # fmt: skip
    return rows, [row["all_but_drafting_us"] / 1e6 for row in rows], [row["drafting_us"] / 1e6 for row in rows]


def everywhere(engine: Engine, cfg: RunConfig) -> DraftLog:
    """A draft of 12 from every position of the model's own greedy output, prompt after prompt."""
    prompts = workload_prompts(cfg, engine)
    measure.apply(engine, Setting("none", None, 5))
    outputs = engine.generate(prompts, cfg.workload.output_len, batch=1).outputs
    measure.apply(engine, Setting("none", None, LONGEST))
    with engine.recording() as read:
        for prompt, output in zip(prompts, outputs, strict=True):
            engine.generate([prompt + output[:end] for end in range(len(output) - 1)], 2, batch=1)
        return read()


def laid(
    log: DraftLog, one: Setting, length: int, verify: Sequence[float], draft: Sequence[float], gate: float
) -> float:
    """Tokens a second of a setting whose rounds are laid over `log`, `length` positions a prompt.

    gate: seconds for each time that the gate is asked; it is not asked after the last step.
    """
    steps = replay.draft_lengths(log, one)
    accepted = log.accepted.minimum(steps).tolist()
    lengths, seconds = steps.tolist(), 0.0
    for start in range(0, len(lengths), length):
        at = 0
        while at < length:
            drafted = lengths[start + at]
            asked = 0 if one.gate == "none" else min(drafted, one.k - 1)
            seconds += verify[drafted] + draft[drafted] + gate * asked
            at += accepted[start + at] + 1
    return len(lengths) / seconds


def bounds(log: DraftLog, length: int, verify: list[float], draft: list[float], gate: float) -> list[dict[str, Any]]:
    """The best of all gates, 40 thresholds and draft lengths against the best fixed length, under four assumptions."""
    slope = (verify[LONGEST] - verify[2]) / (LONGEST - 2)
    line = [verify[5] + (drafts - 5) * slope for drafts in range(LONGEST + 1)]
    gated = [Setting(name, limit, k) for name in log.features for limit in replay.thresholds(log, name, 40)
             for k in range(2, LONGEST + 1)]  # fmt: skip
    rows = []
    for assumed, pass_, cost in (("as measured", verify, gate), ("gate free", verify, 0.0),
                                 ("verify a line", line, gate), ("gate free, verify a line", line, 0.0)):  # fmt: skip
        fixed = {k: laid(log, Setting("none", None, k), length, pass_, draft, 0.0) for k in range(1, LONGEST + 1)}
        best = max(gated, key=lambda one: laid(log, one, length, pass_, draft, cost))
        k = max(fixed, key=lambda k: fixed[k])
        rows.append({"assumed": assumed, "best_fixed_k": k, "best_gated": best.label(),
                     "gated_over_fixed": laid(log, best, length, pass_, draft, cost) / fixed[k]})  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the watch must be in the engine's process
    parser = argparse.ArgumentParser()
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--setting", type=setting, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cfg = RunConfig(layer=given.layer, k=LONGEST, workload=WorkloadConfig())
    with open_engine(cfg) as engine:
        log = everywhere(engine, cfg)
        found = run_arms(engine, cfg, given.setting, given.repeats)
    rounds = {name: in_a_round(runs) for name, runs in found.items()}
    rows, verify, draft = by_size(found)
    asked = sum(min(step["drafts"], given.setting.k - 1) for runs in found["gated"] for step in runs[0])
    gate = (rounds["gated"]["step"] - rounds["forced"]["step"]) * rounds["gated"]["rounds"] / asked / 1e6
    best = bounds(log, cfg.workload.output_len - 1, verify, draft, gate)
    summary = {"setting": given.setting.label(), "gate_us_each_time": gate * 1e6, "us_a_round": rounds, "bounds": best,
            "device": machine.device(cfg), "versions": machine.versions()}  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"rounds_E{given.layer}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    with (given.out / f"verify_E{given.layer}.csv").open("w", encoding="utf-8", newline="") as table:
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: round(value) for name, value in row.items()} for row in rows)
    print(json.dumps({"us_a_round": rounds, "gate_us": gate * 1e6, "bounds": best}, indent=1))


if __name__ == "__main__":
    main()
