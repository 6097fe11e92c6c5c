"""All points of a sweep, each on a live engine that it shares with as many others as it can.

A family is one model on one engine setting. Its baselines are measured first, on one engine; then every group of
points that differ only in gate, threshold or workload runs on one engine more. So `gate=varH tau_v=4,5,6` opens two
engines: the baseline's and the candidates'. One after the other: on a machine whose speed drifts, `_family` is the one
place to change (measure the baseline again between or after the candidates).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from selfspec_cli.artifacts import calibrations
from selfspec_cli.config.keys import baseline_of, engine_key, run_key
from selfspec_cli.config.schema import ConfigError, Method, RunConfig, TrackerKind, gate_threshold, to_plain
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import provenance, records
from selfspec_cli.record.records import Baseline, BenchResult, Record
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.report import make as report
from selfspec_cli.report.rows import group_title, label

BAD_INPUT = (ConfigError, SettingsError)


class Engine(Protocol):
    """What a sweep needs of a live engine."""

    def set_gate(self, kind: str, threshold: float | None, calibration: dict[str, Any] | None) -> None:
        """Change the gate without a reload."""


OpenEngine = Callable[[RunConfig], AbstractContextManager[Any]]
Bench = Callable[[RunConfig, Any, Baseline | None, Progress], BenchResult]


@dataclass
class Family:
    """One model on one engine setting: baselines that share an engine, then groups of points that share one each."""

    baselines: list[RunConfig]
    groups: list[list[RunConfig]]


@dataclass
class Plan:
    """What a sweep will do. `skipped` are points that an earlier run finished."""

    families: list[Family]
    skipped: list[RunConfig] = field(default_factory=list)

    @property
    def engines(self) -> int:
        """Engines that will be opened, if none breaks."""
        return sum(1 + len(family.groups) for family in self.families)


@dataclass
class SweepResult:
    """The rows of one run of one command, in the order in which they were measured."""

    run_id: str
    rows: list[Record] = field(default_factory=list)
    skipped: int = 0
    bad_input: int = 0  # rows that failed because of what the user asked for
    warnings: list[str] = field(default_factory=list)
    drafting: dict[str, dict[str, Any]] = field(default_factory=dict)  # by run key: how the drafts went

    @property
    def failed(self) -> list[Record]:
        """Rows without a measurement."""
        return [row for row in self.rows if row.status != records.OK]

    @property
    def exit_code(self) -> int:
        """0: all measured; 2: what failed was bad input; 1: a run failed."""
        if not self.failed:
            return 0
        return 2 if len(self.failed) == self.bad_input else 1


def plan(cfgs: Iterable[RunConfig], done: Collection[str] = ()) -> Plan:
    """Group points by the engine they can share. A finished baseline is measured again while a point needs it.

    Args:
        done: run keys that are finished.
    """
    cfgs = list(cfgs)
    skipped = [cfg for cfg in cfgs if run_key(cfg) in done]
    families: dict[str, Family] = {}
    groups: dict[str, list[RunConfig]] = {}
    for cfg in cfgs:
        if run_key(cfg) in done:
            continue
        baseline = baseline_of(cfg)
        family = families.setdefault(engine_key(baseline), Family([], []))
        if run_key(baseline) not in {run_key(known) for known in family.baselines}:
            family.baselines.append(baseline)
        if cfg.method is Method.baseline:
            continue
        if engine_key(cfg) not in groups:
            family.groups.append(groups.setdefault(engine_key(cfg), []))
        groups[engine_key(cfg)].append(cfg)
    return Plan(list(families.values()), skipped)


def told_apart(cfgs: Iterable[RunConfig]) -> dict[str, str]:
    """By run key: the settings, as a user types them, in which a point differs from others that a row would call the
    same; empty where there are none."""
    alike: dict[tuple[str, str], list[RunConfig]] = {}
    for cfg in cfgs:
        row = records.identity(cfg, run_id="")
        alike.setdefault((label(row), group_title(row)), []).append(cfg)
    told = {}
    for same in alike.values():
        settings = [_flat(to_plain(cfg)) for cfg in same]
        names = dict.fromkeys(name for flat in settings for name in flat)
        differing = [name for name in names if any(flat.get(name) != settings[0].get(name) for flat in settings)]
        for cfg, flat in zip(same, settings, strict=True):
            values = {name: "null" if flat.get(name) is None else flat[name] for name in differing}
            told[run_key(cfg)] = " ".join(f"{name}={value}" for name, value in values.items())
    return told


def _flat(settings: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return flat


def results_dir(cfgs: Sequence[RunConfig]) -> str:
    """The one folder that all points write to.

    Raises:
        ConfigError: they name more than one.
    """
    folders = sorted({cfg.results_dir for cfg in cfgs})
    if len(folders) != 1:
        raise ConfigError(f"results_dir={','.join(folders)}: one command writes to one folder")
    return folders[0]


@dataclass
class _Run:
    """What every step of one sweep needs."""

    open_engine: OpenEngine
    bench: Bench
    progress: Progress
    tracker: Tracker
    result: SweepResult
    folder: Path
    total: int
    errors: dict[str, Exception] = field(default_factory=dict)  # by run key

    def save(self, measured: BenchResult) -> None:
        """What belongs to a row first; the row, by which a point counts as finished, last."""
        row = replace(measured.record, run_id=self.result.run_id)
        if measured.drafting is not None:
            self.result.drafting[row.key] = measured.drafting
            provenance.write_drafting(self.folder, row.key, measured.drafting)
        if measured.accept is not None:
            records.append(self.folder / records.ACCEPT, replace(measured.accept, run_id=self.result.run_id))
        records.append(self.folder / records.SUMMARY, row)
        self.result.rows.append(row)
        self.guarded("tracker", lambda: self.tracker.log(row))
        self.progress("points", len(self.result.rows), self.total)

    def guarded(self, what: str, action: Callable[[], Any]) -> None:
        """Do what no measurement depends on; its failure is a warning."""
        try:
            action()
        except Exception as error:
            self.result.warnings.append(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")

    def fail(self, cfg: RunConfig, error: Exception, prefix: str = "") -> None:
        self.errors[run_key(cfg)] = error
        self.result.bad_input += isinstance(error, BAD_INPUT)
        provenance.write(cfg, self.result.run_id)
        row = records.identity(cfg, self.result.run_id, device=provenance.device())
        self.save(BenchResult(records.failed(row, error, prefix), []))


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    bench: Bench,
    progress: Progress = ignore,
    tracker: Tracker | None = None,
    again: bool = False,
    run_id: str | None = None,
) -> SweepResult:
    """Measure every point that is not finished, appending each row as soon as it is there.

    A point that fails becomes a row that says why, and the sweep goes on. An interrupt passes through: the rows so far
    are on disk, and the same command goes on from there. A tracker, where one is asked for, gets a chart at the end.

    Args:
        open_engine: starts the engine for a config; a context manager.
        bench: measures one config on an engine against a baseline.
        again: measure finished points too.

    Raises:
        ConfigError: the results folder is in use, or its files have another header.
    """
    folder = Path(results_dir(cfgs))
    with records.sweep_lock(folder):
        records.prepare(folder)
        todo = plan(cfgs, set() if again else records.finished(folder / records.SUMMARY))
        result = SweepResult(run_id or records.new_run_id(), skipped=len(todo.skipped))
        total = sum(len(family.baselines) + sum(map(len, family.groups)) for family in todo.families)
        context = _Run(open_engine, bench, progress, tracker or Tracker(), result, folder, total)
        for family in todo.families:
            _family(context, family)
    if cfgs[0].tracker.kind is not TrackerKind.none:
        context.guarded("chart", lambda: _chart(context))
    return result


def _chart(context: _Run) -> None:
    """The chart of the folder's rows, as `selfspec report` draws it, to the tracker."""
    rows, _ = records.read(context.folder / records.SUMMARY, Record)
    chart = report.chart(rows, context.folder, context.folder)
    if chart is not None:
        context.tracker.chart(chart)


def _family(context: _Run, family: Family) -> None:
    """Baselines first, then the candidates, engine after engine. A candidate without a baseline is not measured."""
    baselines: dict[str, Baseline] = {}
    for group in [family.baselines, *family.groups]:
        ready = []
        for cfg in group:
            lost = None if cfg.method is Method.baseline else context.errors.get(run_key(baseline_of(cfg)))
            if lost is None:
                ready.append(cfg)
            else:
                context.fail(cfg, lost, "its baseline failed: ")
        _on_one_engine(context, ready, baselines)


def _on_one_engine(context: _Run, cfgs: list[RunConfig], baselines: dict[str, Baseline]) -> None:
    """Measure `cfgs` on one live engine. A failure that may have broken the engine costs a fresh one for the rest."""
    waiting = list(cfgs)
    while waiting:
        stack = ExitStack()
        try:
            engine = stack.enter_context(context.open_engine(waiting[0]))
        except Exception as error:
            for cfg in waiting:  # none of them can start: they share this engine
                context.fail(cfg, error)
            return
        try:
            while waiting and _measure(context, waiting.pop(0), engine, baselines):
                pass
        finally:
            context.guarded("closing an engine", stack.close)


def _measure(context: _Run, cfg: RunConfig, engine: Engine, baselines: dict[str, Baseline]) -> bool:
    """Measure one point and save its row; False when the engine can no longer be trusted."""
    provenance.write(cfg, context.result.run_id)
    against = None if cfg.method is Method.baseline else baselines[run_key(baseline_of(cfg))]
    try:
        if cfg.method is Method.layer_skip:
            engine.set_gate(cfg.gate.kind, gate_threshold(cfg), calibrations.map_of(cfg))
        measured = context.bench(cfg, engine, against, context.progress)
    except Exception as error:
        context.fail(cfg, error)
        return isinstance(error, BAD_INPUT)
    if cfg.method is Method.baseline:
        baselines[run_key(cfg)] = Baseline(measured.record, measured.outputs)
    context.save(measured)
    return True
