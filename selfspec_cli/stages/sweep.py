"""All points of a plan, one after the other, each on a live engine that it shares with as many others as it can."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.schema import ConfigError, RunConfig, gate_threshold, to_plain
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import FAILED, OK, Measurement, Point, compare
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.stages.launch import driver
from selfspec_cli.stages.plan import Family, Planned, plan, results_dir

OpenEngine = Callable[[RunConfig], AbstractContextManager[Any]]
Bench = Callable[[RunConfig, Any, Progress], Measurement]


@dataclass
class SweepResult:
    """The points of one run of one command, in the order in which they were measured."""

    run_id: str
    points: list[Point] = field(default_factory=list)
    skipped: int = 0
    bad_input: int = 0  # points that failed because of what the user asked for
    left: int = 0  # points that there was no time for, or that no worker gave back
    warnings: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Record]:
        return [tables.row(point) for point in self.points]

    @property
    def failed(self) -> list[Point]:
        """Points without a measurement."""
        return [point for point in self.points if not point.ok]

    @property
    def exit_code(self) -> int:
        """0: all measured; 2: what failed was bad input; 1: a run failed."""
        if not self.failed:
            return 0
        return 2 if len(self.failed) == self.bad_input else 1


@dataclass
class _Run:
    """What every step of one sweep needs. baselines: by key, with whether an earlier command measured them."""

    open_engine: OpenEngine
    bench: Bench
    progress: Progress
    tracker: Tracker
    result: SweepResult
    folder: Path
    baselines: dict[str, tuple[Point, bool]]
    ends: float | None
    keep: Callable[[Point], Any] | None = None  # takes points in place of the folder
    errors: dict[str, Exception] = field(default_factory=dict)  # by run key

    def has_time(self) -> bool:
        """Whether another point may begin."""
        return self.ends is None or time.time() < self.ends

    def save(self, point: Point) -> None:
        """Write a point, measured or failed; a later run skips it only if it was measured."""
        if self.keep is not None:
            self.keep(point)
            self.result.points.append(point)
            return
        (point,) = results.with_quality(self.folder, [point])
        results.save(self.folder, point)
        self.result.points.append(point)
        self.or_warn("tracker", lambda: self.tracker.log(point))
        self.progress.measured(point)

    def or_warn(self, what: str, action: Callable[[], Any]) -> None:
        """Do what no measurement depends on; its failure is a warning."""
        try:
            action()
        except Exception as error:
            self.result.warnings.append(f"{what}: {on_one_line(error)}")

    def fail(self, planned: Planned, error: Exception, prefix: str = "", started: float | None = None) -> None:
        interrupts.check()  # an engine whose processes got the interrupt too fails, and that says nothing of the point
        self.errors[planned.key] = error
        self.result.bad_input += isinstance(error, ConfigError)
        self.save(_point(self, planned, None, started, reason=(prefix + on_one_line(error))[:300]))


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    bench: Bench,
    progress: Progress = ignore,
    tracker: Tracker | None = None,
    again: bool = False,
    reuse_baseline: bool = False,
    retry_failed: bool = False,
    ends: float | None = None,
    run_id: str | None = None,
) -> SweepResult:
    """Measure every point that is not finished; each is on disk as soon as it is measured. A point that fails is
    written down with the reason, and the sweep goes on. again, reuse_baseline, retry_failed: as `plan` takes them.
    ends: no point is begun after this (seconds since 1970), and the result says how many are left. Raises ConfigError:
    the results folder is in use, or cannot be written; RecordError: a point could not be written."""
    folder = Path(results_dir(cfgs))
    with interrupts.deferred(), results.writing(folder):
        warnings = driver.collect(folder)
        known = results.read(folder)[0]
        todo = plan(cfgs, known, again=again, reuse_baseline=reuse_baseline, retry_failed=retry_failed)
        progress.planned(todo)
        result = SweepResult(run_id or results.new_run_id(), skipped=len(todo.skipped), warnings=warnings)
        reused, _ = results.read(folder, {point.id for point in todo.reused.values()}) if todo.reused else ([], [])
        baselines = {point.key: (point, True) for point in reused}
        context = _Run(open_engine, bench, progress, tracker or Tracker(), result, folder, baselines, ends)
        if cfgs and cfgs[0].launcher.kind != "local":
            result.left = driver.run(
                todo, cfgs[0], result.run_id, folder, save=context.save, fail=context.fail, progress=progress, ends=ends
            )
        else:
            for family in todo.families:
                _family(context, family)
            result.left = len(todo.points) - len(result.points)
    return result


def run_unit(
    cfgs: Sequence[RunConfig],
    run_id: str,
    keys: Mapping[str, str],
    *,
    open_engine: OpenEngine,
    bench: Bench,
    keep: Callable[[Point], Any],
    ends: float | None,
) -> None:
    """Measure configs and baselines; `keep` takes each point. keys: this machine's -> recorded. ends: as for `run`."""

    def renamed(one: Planned) -> Planned:
        return replace(one, key=keys.get(one.key, one.key), baseline=keys.get(one.baseline, one.baseline))

    context = _Run(open_engine, bench, ignore, Tracker(), SweepResult(run_id), Path(), {}, ends, keep)
    with interrupts.deferred():
        for family in plan(cfgs).families:
            baselines, *groups = [[*map(renamed, group)] for group in (family.baselines, *family.groups)]
            _family(context, Family(baselines, groups))


def _family(context: _Run, family: Family) -> None:
    """Baselines first, then the candidates, engine after engine. A candidate without a baseline is not measured."""
    for group in family.engines:
        ready = []
        for planned in group:
            lost = None if planned.is_baseline else context.errors.get(planned.baseline)
            if lost is None:
                ready.append(planned)
            else:
                context.fail(planned, lost, "its baseline failed: ")
        _on_one_engine(context, ready)


def _on_one_engine(context: _Run, points: list[Planned]) -> None:
    """Measure points on one live engine. A failure that may have broken the engine costs a fresh one for the rest."""
    waiting = list(points)
    while waiting and context.has_time():
        stack = ExitStack()
        began = time.perf_counter()
        try:
            engine = stack.enter_context(context.open_engine(waiting[0].cfg))
        except Exception as error:
            for planned in waiting:  # none of them can start: they share this engine
                context.fail(planned, error)
            return
        started = getattr(engine, "start_seconds", time.perf_counter() - began)
        try:
            while waiting and context.has_time():
                interrupts.check()
                if not _measure(context, waiting.pop(0), engine, started):
                    break
        finally:
            context.or_warn("closing an engine", stack.close)


def _measure(context: _Run, planned: Planned, engine: Any, started: float) -> bool:
    """Measure one point and save it; False when the engine can no longer be trusted."""
    cfg = planned.cfg
    context.progress.measuring(planned)
    try:
        if cfg.method == "layer_skip":
            engine.set_gate(str(cfg.gate.kind), gate_threshold(cfg))
        measured = context.bench(cfg, engine, context.progress)
    except Exception as error:
        context.fail(planned, error, started=started)
        return isinstance(error, ConfigError)
    point = _point(context, planned, measured, started)
    if planned.is_baseline:
        context.baselines[planned.key] = (point, False)
    context.save(point)
    return True


def _point(
    context: _Run,
    planned: Planned,
    measured: Measurement | None,
    started: float | None,
    reason: str | None = None,
) -> Point:
    cfg, run_id = planned.cfg, context.result.run_id
    comparison = None
    if measured is not None and not planned.is_baseline:
        baseline, reused = context.baselines[planned.baseline]
        comparison = compare(measured, baseline, reused=reused, real_text=cfg.acceptance_length is None)
    measured = measured or Measurement(())
    return Point(
        id=f"{planned.key}-{run_id}",
        key=planned.key,
        run_id=run_id,
        number=len(context.result.points),
        time=results.now(),
        status=OK if reason is None else FAILED,
        reason=reason,
        seconds=measured.seconds,
        start_seconds=started,
        device=planned.device,
        arm=tables.identity(cfg, measured.engine.get("layer")),
        config=to_plain(cfg),
        digests=planned.digests,
        **machine.provenance(),
        hardware=machine.hardware(),
        compared_with=comparison,
        engine=measured.engine,
        perplexity=measured.perplexity,
        outputs=measured.outputs,
        repeats=measured.repeats,
        arm_key=planned.arm,
    )
