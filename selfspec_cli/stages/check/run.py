"""A performance check: measure arms and their baselines by the loop of a sweep, count what must not happen after each
measurement, judge, and keep the verdict. What stays between red and green is measured again, up to `runs` times."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record.point import Measurement, Point
from selfspec_cli.stages import sweep
from selfspec_cli.stages.check import verdict
from selfspec_cli.stages.check.file import Case, CheckFile
from selfspec_cli.stages.check.verdict import FOUND, UNSURE, Result, judged, worst
from selfspec_cli.stages.plan import results_dir
from selfspec_cli.texts.prompts import workload_prompts

FAULTY_WORKER = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"
PLANTED = ("lost_draft", "slower_step", "eager_step", "host_synchronisation", "debug_copy")
"""Faults of tests/packages/faults/selfspec_faults/speed.py; the last two on CUDA alone."""
WATCHED = 48  # tokens of each request while it is counted what must not happen
Open = Callable[..., AbstractContextManager[Any]]


def run(
    file: CheckFile,
    cfgs: Sequence[RunConfig],
    *,
    open_engine: Open,
    bench: sweep.Bench,
    progress: Progress = ignore,
    plant: str | None = None,
    run_id: str | None = None,
    reuse_baseline: bool = False,
) -> dict[str, Any]:
    """Measure and judge; the verdict, which is also added to the folder's checks.jsonl.

    cfgs: one for each case of the file, all of one results folder; with a fault to plant one of its own, for such a run
    says nothing of the code. plant: a fault of `PLANTED` that every drafting engine gets. reuse_baseline: compare with
    baselines of earlier commands, where there are some.

    Raises:
        ConfigError: what the cfgs ask for cannot be had.
        RecordError: a point or the verdict could not be written.
    """
    folder, keys, began = Path(results_dir(cfgs)), Keys(), time.perf_counter()
    names = [keys.run(cfg) for cfg in cfgs]
    points: list[Point] = []
    found: list[Result] = []
    wanted, runs = list(names), 0

    def kept() -> dict[str, Any]:
        line: dict[str, Any] = {
            "run_id": run_id or results.new_run_id(),
            "time": results.now(),
            "check": file.name,
            "title": file.title,
            "digest": file.digest,
            "outcome": worst(one.outcome for one in found),
            "runs": runs,
            "place": verdict.place(keys.device(cfgs[0])),
            "results": [asdict(one) for one in found],
            "points": [point.id for point in points],
            "planted": plant,
            "seconds": round(time.perf_counter() - began, 1),
        }
        return line | {"file": str(verdict.keep(folder, line))}

    while wanted and runs < file.runs:
        chosen = {name: cfg for name, cfg in zip(names, cfgs, strict=True) if name in wanted}
        more: dict[str, Any] = {"again": True, "reuse_baseline": reuse_baseline, "progress": progress}
        try:
            done = sweep.run([*chosen.values()], open_engine=_planted(open_engine, plant), bench=watched(bench), **more)
        except KeyboardInterrupt:
            if runs:  # the runs before took minutes, and have a verdict
                kept()
            raise
        if done.bad_input:
            raise ConfigError(str(done.failed[0].reason))
        points, runs = points + done.points, runs + 1
        baselines = {point.compared_with.baseline for point in points if point.compared_with}
        others = results.read(folder, baselines)[0] if reuse_baseline else []
        known = {point.id: point for point in [*others, *points]}
        pairs = [*zip(file.cases, names, strict=True)]
        found = [one for case, name in pairs for one in judged(case, [p for p in points if p.key == name], known)]
        wanted = [name for case, name in pairs if _unsure(case, found)]
    return kept()


def watched(bench: sweep.Bench) -> sweep.Bench:
    """A bench that counts what must not happen, after each measurement of an arm that drafts with its own layers."""

    def measure(cfg: RunConfig, engine: Any, progress: Progress) -> Measurement:
        measured = bench(cfg, engine, progress)
        if cfg.method is not Method.layer_skip or not hasattr(engine, "generate"):
            return measured
        work = cfg.workload
        prompts = list(workload_prompts(cfg, engine))[: work.batch]
        engine.call("early_exit_watch", True)
        engine.generate(
            prompts, min(work.output_len, WATCHED), batch=work.batch, temperature=work.temperature, seed=cfg.seed
        )
        return replace(measured, engine=measured.engine | {FOUND: engine.call("early_exit_watch", False)})

    return measure


def _planted(open_engine: Open, fault: str | None) -> Open:
    """What opens engines, with a fault in each that drafts."""
    if fault is None:
        return open_engine

    @contextmanager
    def faulty(cfg: RunConfig) -> Iterator[Any]:
        drafts = cfg.method is Method.layer_skip
        with open_engine(cfg, **({"worker_extension_cls": FAULTY_WORKER} if drafts else {})) as engine:
            if drafts:
                engine.call("early_exit_plant", fault)
            yield engine

    return faulty


def _unsure(case: Case, found: Sequence[Result]) -> bool:
    """Whether more repeats may tell: nothing is red, and some value is not measurable although it is there."""
    mine = [one for one in found if one.case == case.name]
    unsure = [one for one in mine if one.outcome == UNSURE]
    return worst(one.outcome for one in mine) == UNSURE and all(one.value is not None for one in unsure)
