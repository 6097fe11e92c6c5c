"""What `bench` and `sweep` share: plan, measure on real engines, show."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from selfspec_cli.commands import screen
from selfspec_cli.commands.configs import NO_COMPILER
from selfspec_cli.commands.live_page import LivePage
from selfspec_cli.commands.screen import ROWS_KEPT, SWEEP_GOES_ON, emit, note, rows_document, say, warn
from selfspec_cli.commands.tracked import send, tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import ConfigError, LoadConfig, RunConfig
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder as results_folder
from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import label
from selfspec_cli.stages import plan as planning
from selfspec_cli.stages import preflight
from selfspec_cli.stages import sweep as sweep_stage


@dataclass(frozen=True)
class Ways:
    """How a sweep is gone about.

    again: measure finished points too. reuse_baseline: see `sweep.run`. retry_failed: only points that failed.
    max_hours: begin no point after that; None for no limit. watch: make the page again after points. execute: run the
    answers of HumanEval with their tests.
    """

    again: bool = False
    reuse_baseline: bool = False
    retry_failed: bool = False
    max_hours: float | None = None
    watch: bool = False
    execute: bool = False

    @property
    def plan(self) -> dict[str, bool]:
        """Arguments of `plan.plan`."""
        return {name: getattr(self, name) for name in ("again", "reuse_baseline", "retry_failed")}


def why_left(ways: Ways, left: int) -> str:
    """Why points have no row, and what becomes of them."""
    said = f"{left} point(s) did not come back from the workers that measured them"
    if ways.max_hours is not None:
        said = f"--max-hours {ways.max_hours:g} is over, and {left} point(s) were not begun"
    return f"{said}; {ROWS_KEPT if ways.again else SWEEP_GOES_ON}"


@dataclass(frozen=True)
class Means:
    """What arms are measured on, engines in this process or servers.

    opened: for the screen and the run id of a command, what starts one for a config, and what measures a config on it.
    doubts: what points say against their own figures. found: what else they say, in sentences. page: writes the report
    page of a folder; None for a command that writes none."""

    opened: Callable[[Progress, str], tuple[sweep_stage.OpenEngine, sweep_stage.Bench]]
    doubts: Callable[[Sequence[Point]], list[str]] = lambda points: []
    found: Callable[[Sequence[Point]], list[str]] = lambda points: []
    page: Callable[[Path], Path | None] | None = None


def _engines(shown: Progress, run_id: str) -> tuple[sweep_stage.OpenEngine, sweep_stage.Bench]:
    from selfspec_cli.stages.bench import run as bench_one

    return shown_starting(shown, forked=True), bench_one


def _passed(points: Sequence[Point]) -> list[str]:
    """How many answers of each point pass their tests, where they were run."""
    found = [(label(tables.row(point)), *point.engine["pass_at_1"]) for point in points if "pass_at_1" in point.engine]
    return [f"{name}: {passed} of {of} answers pass their tests (pass@1)" for name, passed, of in found]


ENGINES = Means(_engines, found=_passed)


def nothing_typed(command: str, overrides: Sequence[str] | None, config: Path | None, example: str) -> bool:
    """Whether a command was typed without any setting: it then shows its plan, and says here what to type."""
    if overrides or config is not None:
        return False
    note(
        f"selfspec {command} alone starts nothing. This is its plan; to measure it: selfspec {command} "
        f"model={RunConfig().model.name}   ·   with settings of your own: {example}"
    )
    return True


def measure(
    command: str,
    runs: list[RunConfig],
    ways: Ways,
    *,
    as_json: bool,
    dry_run: bool,
    debug: bool,
    means: Means = ENGINES,
) -> None:
    """Plan, measure, show; the exit code says how it went. command: how the log is called."""
    if means is ENGINES and any(cfg.load != LoadConfig() for cfg in runs):
        raise ConfigError(f"load.* are settings of a load test of a server, and {command} has none: selfspec load ...")
    preflight.check_all(runs)
    runs = [preflight.with_calibration(cfg) for cfg in runs]
    asked, runs = runs, preflight.for_this_machine(runs)
    doubts = [*preflight.warnings(runs), *preflight.nothing_drawn(runs)]
    doubts += [NO_COMPILER] if asked != runs else []
    warn(doubts)
    folder = Path(planning.results_dir(runs))
    if dry_run:
        plan = planning.plan(runs, results_folder.heads(folder), **ways.plan)
        return emit(screen.plan_document(plan)) if as_json else screen.show_plan(plan)
    preflight.check_device(runs[0])
    result, plans = _sweep(command, runs, ways, debug, means)
    result.warnings += means.doubts(result.points)
    warn(result.warnings)
    page = None if means.page is None or not result.points else means.page(folder)
    failed = len(result.failed)
    counts = {"measured": len(result.points) - failed, "skipped": result.skipped, "failed": failed}
    if result.left:
        counts["left"] = result.left
        warn([why_left(ways, result.left)])
    summary = folder / results_folder.SUMMARY
    if as_json:
        drafting = {
            point.key: summed for point in result.points if (summed := tables.drafting_summary(point)) is not None
        }
        more: dict[str, Any] = {"drafting": drafting, "warnings": [*doubts, *result.warnings]}
        more |= {} if page is None else {"page": page}
        more |= {"found": said} if (said := means.found(result.points)) else {}
        emit({"run_id": result.run_id, **counts, "summary": summary, "rows": rows_document(result.rows), **more})
    else:
        from selfspec_cli.report import table

        wanted = {planned.key for plan in plans for planned in [*plan.points, *plan.skipped]}
        table.show(_with_baselines(folder, wanted), Console())
        for line in means.found(result.points):
            say(line)
        say(", ".join(f"{count} {what}" for what, count in counts.items()) + f"; rows in {summary}")
        say(f"page: {page}") if page is not None else None
    raise typer.Exit(result.exit_code or int(result.left > 0 and ways.max_hours is None))


def _with_baselines(folder: Path, keys: set[str]) -> list[Record]:
    """The rows of a folder that have one of these keys, and the baselines that they were compared with."""
    points, _ = results_folder.read(folder, keys)
    missing = {point.compared_with.baseline for point in points if point.compared_with} - {p.id for p in points}
    if missing:
        points = results_folder.in_order([*points, *results_folder.read(folder, missing)[0]])
    return [tables.row(point) for point in points]


def _sweep(
    command: str, runs: list[RunConfig], ways: Ways, debug: bool, means: Means
) -> tuple[sweep_stage.SweepResult, list[planning.Plan]]:
    """The sweep on real engines, with the tracker; and what it had planned."""
    run_id, folder = results_folder.new_run_id(), Path(planning.results_dir(runs))
    ends = None if ways.max_hours is None else time.time() + 3600 * ways.max_hours
    with tracked(command, runs[0], run_id) as tracker, at_work(command, folder, debug) as shown:
        shown.page = LivePage(folder) if ways.watch else None
        open_engine, bench = means.opened(shown, run_id)
        more: dict[str, Any] = {"execute": True} if ways.execute else {}
        try:
            result = sweep_stage.run(
                runs,
                open_engine=open_engine,
                bench=partial(bench, **more),
                progress=shown,
                tracker=tracker,
                go_on=lambda: ends is None or time.time() < ends,
                ends=ends,
                run_id=run_id,
                **ways.plan,
            )
        finally:
            if shown.page is not None:
                shown.page.close()
        if runs[0].tracker.kind != "none" and result.points:
            send(tracker, command, folder, result.rows)
    return result, shown.plans


def shown_starting(progress: Progress, *, forked: bool = False) -> Callable[..., AbstractContextManager[Any]]:
    """`engine.live.open_engine`, reporting when an engine starts. vLLM is imported when the first one does.

    forked: see `engine.processes.fork_engines`.
    """

    @contextmanager
    def open_engine(cfg: RunConfig, **more: Any) -> Iterator[Any]:
        from selfspec_cli.engine import live, processes

        progress.starting(f"{cfg.model.name}, {label(tables.planned(cfg))}")
        if forked:
            processes.fork_engines(cfg)
        with ExitStack() as stack:
            try:
                engine = stack.enter_context(live.open_engine(cfg, **more))
            finally:
                progress.started()
            yield engine

    return open_engine
