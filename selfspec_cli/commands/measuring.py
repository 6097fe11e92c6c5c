"""What commands that measure share: plan, measure on real engines, show, and send to the experiment tracker."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import typer
from rich.console import Console

from selfspec_cli.commands import screen
from selfspec_cli.commands.configs import runnable
from selfspec_cli.commands.screen import ROWS_KEPT, SWEEP_GOES_ON, Output, emit, note, say, warn
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import ConfigError, LoadConfig, RunConfig
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder as results_folder
from selfspec_cli.record import quality, tables
from selfspec_cli.record.columns import Record, known, plain
from selfspec_cli.record.point import Point
from selfspec_cli.record.tracking import Tracker, open_tracker
from selfspec_cli.report.rows import label
from selfspec_cli.stages import plan as planning
from selfspec_cli.stages import preflight
from selfspec_cli.stages import sweep as sweep_stage

T = TypeVar("T")


@dataclass(frozen=True)
class SweepOptions:
    """Which points a sweep measures, and until when: `plan.plan` has the first three. max_hours: begin no point after
    that. execute: run the code that the model writes (stages/humaneval.py)."""

    again: bool = False
    reuse_baseline: bool = False
    retry_failed: bool = False
    max_hours: float | None = None
    execute: bool = False

    @property
    def plan(self) -> dict[str, bool]:
        """Arguments of `plan.plan`."""
        return {name: getattr(self, name) for name in ("again", "reuse_baseline", "retry_failed")}

    def typed(self) -> list[str]:
        """The options as they are typed, such as "--max-hours=2"."""
        given = {
            f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if value not in (None, False)
        }
        return [name if value is True else f"{name}={value}" for name, value in given.items()]

    def why_left(self, left: int) -> str:
        """Why points have no row, and what becomes of them."""
        said = f"{left} point(s) did not come back from the workers that measured them"
        if self.max_hours is not None:
            said = f"--max-hours {self.max_hours:g} is over, and {left} point(s) were not begun"
        return f"{said}; {ROWS_KEPT if self.again else SWEEP_GOES_ON}"


@dataclass(frozen=True)
class Backend:
    """What arms are measured on, engines in this process or servers. opened: from the screen and the run id of a
    command, what starts one for a config, and what measures a config on it. warnings: what points say against their own
    figures. found: what else they say. page: writes the report page of a folder."""

    opened: Callable[[Progress, str], tuple[sweep_stage.OpenEngine, sweep_stage.Bench]]
    warnings: Callable[[Sequence[Point]], list[str]] = lambda points: []
    found: Callable[[Sequence[Point]], list[str]] = lambda points: []
    page: Callable[[Path], Path | None] | None = None


def _engines(shown: Progress, run_id: str) -> tuple[sweep_stage.OpenEngine, sweep_stage.Bench]:
    from selfspec_cli.stages.measure import bench

    return shown_starting(shown, forked=True), bench


ENGINES = Backend(_engines)


def unless_nothing_typed(
    out: Output, command: str, overrides: Sequence[str] | None, config: Path | None, example: str
) -> Output:
    """`out`, as a dry run where a command was typed without any setting: it shows its plan, and here what to type."""
    if overrides or config is not None:
        return out
    note(
        f"selfspec {command} alone starts nothing. This is its plan; to measure it: selfspec {command} "
        f"model={RunConfig().model.name}   ·   with settings of your own: {example}"
    )
    return replace(out, dry_run=True)


def measure(
    command: str, runs: list[RunConfig], options: SweepOptions, out: Output, backend: Backend = ENGINES
) -> None:
    """Plan, measure, show; the exit code says how it went. command: how the log is called."""
    if backend is ENGINES and any(cfg.load != LoadConfig() for cfg in runs):
        raise ConfigError(f"load.* are settings of a load test of a server, and {command} has none: selfspec load ...")
    runs = runnable(runs)
    before = [*preflight.warnings(runs), *preflight.nothing_drawn(runs)]
    warn(before)
    folder = Path(planning.results_dir(runs))
    if out.dry_run:
        plan = planning.plan(runs, results_folder.read(folder)[0], **options.plan)
        return out.answer(screen.plan_document(plan), lambda: screen.show_plan(plan))
    preflight.check_device(runs[0])
    result, plans = _sweep(command, runs, options, out.debug, backend)
    result.warnings += backend.warnings(result.points)
    warn(result.warnings)
    page = None if backend.page is None or not result.points else backend.page(folder)
    failed = len(result.failed)
    counts = {"measured": len(result.points) - failed, "skipped": result.skipped, "failed": failed}
    if result.left:
        counts["left"] = result.left
        warn([options.why_left(result.left)])
    summary = folder / results_folder.SUMMARY
    if out.as_json:
        drafting = [(point.key, tables.drafting_summary(point)) for point in result.points]
        document: dict[str, Any] = {"run_id": result.run_id, **counts, "summary": summary}
        document["rows"] = [plain(row) for row in result.rows]
        document["drafting"] = {key: summed for key, summed in drafting if summed is not None}
        document["warnings"] = [*before, *result.warnings]
        document |= {} if page is None else {"page": page}
        document |= {"found": said} if (said := backend.found(result.points)) else {}
        emit(document)
    else:
        from selfspec_cli.report import table

        wanted = {planned.key for plan in plans for planned in [*plan.points, *plan.skipped]}
        table.show(_with_baselines(folder, wanted), Console())
        for line in backend.found(result.points):
            say(line)
        say(", ".join(f"{count} {what}" for what, count in counts.items()) + f"; rows in {summary}")
        say(f"page: {page}") if page is not None else None
    raise typer.Exit(result.exit_code or int(result.left > 0 and options.max_hours is None))


def _with_baselines(folder: Path, keys: set[str]) -> list[Record]:
    """The rows of a folder that have one of these keys, and the baselines that they were compared with."""
    points, _ = results_folder.read(folder, keys)
    missing = {point.compared_with.baseline for point in points if point.compared_with} - {p.id for p in points}
    if missing:
        points = results_folder.in_order([*points, *results_folder.read(folder, missing)[0]])
    return [tables.row(point) for point in points]


def _sweep(
    command: str, runs: list[RunConfig], options: SweepOptions, debug: bool, backend: Backend
) -> tuple[sweep_stage.SweepResult, list[planning.Plan]]:
    run_id, folder = results_folder.new_run_id(), Path(planning.results_dir(runs))
    ends = None if options.max_hours is None else time.time() + 3600 * options.max_hours
    with tracked(command, runs[0], run_id) as tracker, at_work(command, folder, debug) as shown:
        open_engine, bench = backend.opened(shown, run_id)
        more: dict[str, Any] = {"execute": True} if options.execute else {}
        result = sweep_stage.run(
            runs,
            open_engine=open_engine,
            bench=partial(bench, **more),
            progress=shown,
            tracker=tracker,
            ends=ends,
            run_id=run_id,
            **options.plan,
        )
        if runs[0].tracker.kind != "none" and result.points:
            send(tracker, command, folder, result.rows)
    return result, shown.plans


@contextmanager
def on_engines(
    out: Output, command: str, cfg: RunConfig, *, is_tracked: bool = True, forked: bool = False
) -> Iterator[dict[str, Any]]:
    """While a command works on real engines: `open_engine` and `progress`, as the stages take them. is_tracked: the
    tracker of `cfg` gets the table and the figures of the results folder. forked: see `shown_starting`."""
    with ExitStack() as stack:
        if is_tracked:
            stack.enter_context(tracked(command, cfg))
        shown = stack.enter_context(at_work(command, cfg.results_dir, out.debug))
        yield {"open_engine": shown_starting(shown, forked=forked), "progress": shown}


def shown_starting(progress: Progress, *, forked: bool = False) -> Callable[..., AbstractContextManager[Any]]:
    """`engine.live.open_engine`, reporting when an engine starts. forked: see `engine.live.fork_engines`."""

    @contextmanager
    def open_engine(cfg: RunConfig, **more: Any) -> Iterator[Any]:
        from selfspec_cli.engine import live

        progress.starting(f"{cfg.model.name}, {label(tables.planned(cfg))}")
        if forked:
            live.fork_engines(cfg)
        with begun(progress, live.open_engine(cfg, **more)) as engine:
            yield engine

    return open_engine


@contextmanager
def begun(progress: Progress, opening: AbstractContextManager[T]) -> Iterator[T]:
    """What is being opened, reported as started once it is, or could not be."""
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(opening)
        finally:
            progress.started()
        yield opened


@contextmanager
def tracked(command: str, cfg: RunConfig, run_id: str | None = None) -> Iterator[Tracker]:
    """The tracker of `cfg` while a command measures; then it gets the table and figures of the results folder, unless a
    report was sent. Raises ConfigError: the tracker that is asked for is not installed."""
    with open_tracker(cfg, run_id or results_folder.new_run_id()) as tracker:
        yield tracker
        if cfg.tracker.kind != "none" and not tracker.reported:
            send(tracker, command, Path(cfg.results_dir))
    for message in tracker.messages:
        note(message)


def send(tracker: Tracker, command: str, folder: Path, rows: list[Record] | None = None) -> None:
    """Log rows (all of a results folder, if they are not given) and the figures of the folder."""
    from selfspec_cli.report import make

    try:
        with TemporaryDirectory() as place:
            shown = rows_of(folder) if rows is None else rows
            tracker.report(command, folder, shown, make.pictures(folder, place))
    except Exception as error:  # what was measured is on disk: what a tracker cannot do must not hide it
        tracker.messages.append(f"tracker: {on_one_line(error)}")


def rows_of(folder: str | Path) -> list[Record]:
    """The rows of a results folder, and one for each arm of which only its quality is known."""
    points, book = results_folder.read(folder)[0], quality.read(folder)
    measured = {point.arm_key for point in points}
    alone = {finding.arm_key: finding for finding in book.findings.values() if finding.arm_key not in measured}
    rows = [
        replace(
            tables.of_arm(one.arm), run_id=one.run_id, time=one.time, device=one.device, **known(book.columns(key, ""))
        )
        for key, one in alone.items()
    ]
    return [tables.row(point) for point in points] + [tables.with_delta(row) for row in rows]
