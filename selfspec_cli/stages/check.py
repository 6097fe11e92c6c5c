"""Performance checks (`selfspec check`): is the speed still what a file of experiments/checks/ asks for?

A value is of all repeats of all runs, with its 95 % interval (`record.statistics`). It is green where the whole
interval reaches the limit, red where none of it does, and else measured again, up to `runs` times.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.paths import checked_mapping, read_yaml
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.counters import INVARIANTS
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import archive, tables
from selfspec_cli.record import folder as results
from selfspec_cli.record.folder import explained
from selfspec_cli.record.point import Measurement, Point, median
from selfspec_cli.record.statistics import speedup_interval
from selfspec_cli.record.targets import NUMBERS, less_is_better
from selfspec_cli.stages import sweep
from selfspec_cli.stages.plan import results_dir
from selfspec_cli.texts.prompts import workload_prompts

START, IDENTICAL = "start_seconds", "identical_share"
MEASURES = (*NUMBERS, START, IDENTICAL)
"""What can be asked for: the columns of a row that are numbers, seconds that an engine took to start, and the share of
outputs that are the baseline's, token for token."""
OF_BASELINE = "of_baseline"
RUNS = 3


@dataclass(frozen=True)
class Bound:
    """A measure must be `limit` at least, or at most where less is better. of_baseline: its ratio to the baseline."""

    measure: str
    limit: float
    of_baseline: bool = False

    @property
    def most(self) -> bool:
        """Whether the limit is the greatest value allowed, and not the least."""
        return self.measure == START or less_is_better(self.measure)

    def __str__(self) -> str:
        of = " of the baseline's" if self.of_baseline else ""
        return f"{self.measure} {'at most' if self.most else 'at least'} {self.limit:g}{of}"


@dataclass(frozen=True)
class Case:
    """One arm on one workload. words: Hydra's, of both. invariants: names of `INVARIANTS` that must be 0."""

    name: str
    words: tuple[str, ...]
    reach: tuple[Bound, ...]
    invariants: tuple[str, ...]


@dataclass(frozen=True)
class CheckFile:
    """A file. runs: of a point, at most. served: the arms are servers, asked over HTTP. digest: of the content."""

    name: str
    title: str
    cases: tuple[Case, ...]
    runs: int
    served: bool
    digest: str


def read(path: Path) -> CheckFile:
    """A file as a CheckFile. Raises ConfigError, with the place: it cannot be read or understood."""
    given = read_yaml(path, ("title", "runs", "served", "settings", "cases"))
    settings = _words(given.get("settings", []), f"{path}: settings")
    if not isinstance(given.get("cases"), list) or not given["cases"]:
        raise ConfigError(f"{path}: cases must be a list of at least one case")
    cases = tuple(_case(one, settings, f"{path}: cases[{number}]") for number, one in enumerate(given["cases"]))
    names = [case.name for case in cases]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: {', '.join(sorted(repeated))}: two cases of one name")
    runs = given.get("runs", RUNS)
    if isinstance(runs, bool) or not isinstance(runs, int) or not 1 <= runs <= 20:
        raise ConfigError(f"{path}: runs={runs!r}: allowed are whole numbers from 1 to 20")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return CheckFile(path.stem, str(given.get("title", "")), cases, runs, bool(given.get("served")), digest)


def with_words(file: CheckFile, words: Sequence[str]) -> CheckFile:
    """A file with words that win over its own; but for the results folder, its verdict is then that of another file."""
    changes = [word for word in words if not word.startswith("results_dir=")]
    typed = {word.partition("=")[0] for word in words}
    cases = [
        replace(case, words=(*(word for word in case.words if word.partition("=")[0] not in typed), *words))
        for case in file.cases
    ]
    return replace(file, cases=tuple(cases), digest=" ".join([file.digest, *changes]))


def _case(content: Any, settings: tuple[str, ...], place: str) -> Case:
    given = checked_mapping(content, place, ("name", "arm", "workload", "reach", "invariants"))
    if not isinstance(given.get("name"), str):
        raise ConfigError(f"{place}: name is missing")
    place = f"{place} ({given['name']})"
    reach = checked_mapping(given.get("reach", {}), f"{place}: reach", MEASURES)
    bounds = tuple(_bound(name, value, f"{place}: reach") for name, value in reach.items())
    invariants = given.get("invariants", [])
    names = tuple(INVARIANTS) if invariants == "all" else _words(invariants, f"{place}: invariants")
    for name in names:
        if name not in INVARIANTS:
            raise ConfigError(f"{place}: {closest(name, [*INVARIANTS, 'all'], 'invariant')}")
    if not bounds and not names:
        raise ConfigError(f"{place}: it asks for nothing; give it reach or invariants")
    more = (_words(given.get(part, []), f"{place}: {part}") for part in ("workload", "arm"))
    return Case(given["name"], sum(more, settings), bounds, names)


def _bound(name: str, value: Any, place: str) -> Bound:
    of_baseline = isinstance(value, dict)
    limit = checked_mapping(value, f"{place}: {name}", (OF_BASELINE,)).get(OF_BASELINE) if of_baseline else value
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise ConfigError(
            f"{place}: {name}={value!r}: write a number, or {{{OF_BASELINE}: NUMBER}} for the ratio to the baseline's"
        )
    return Bound(name, float(limit), of_baseline)


def _words(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{place}: it must be a list of words, such as [layer=3, k=4]; {value!r} is none")
    return tuple(value)


GREEN, RED, UNSURE, ABSENT = "green", "red", "not measurable", "not applicable"
OUTCOMES = (RED, UNSURE, GREEN)  # the worst first; what is not applicable decides nothing
HISTORY = "checks.jsonl"  # verdicts of a results folder, run after run: lines of JSON, which are only ever added to
FOUND = "invariants"  # where `Point.engine` keeps what `Watch.stop` answered


Value = tuple[float, tuple[float, float] | None]  # A value and its interval


@dataclass(frozen=True)
class Result:
    """One thing that was asked for, and what came out. value, low, high: None where nothing was measured."""

    case: str
    asked: str
    outcome: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None

    @property
    def measured(self) -> str:
        """The value with its interval, for people."""
        if self.value is None:
            return ""
        same = self.low is None or self.low == self.high
        return f"{self.value:.4g}" + ("" if same else f" ({self.low:.4g} to {self.high:.4g})")


def judged(case: Case, points: Sequence[Point], baselines: Mapping[str, Point]) -> list[Result]:
    """Every result of a case. points: of its arm, one a run. baselines: by id."""
    failed = [point for point in points if not point.ok]
    if failed or not points:
        reason = failed[0].reason if failed else "no point was measured"
        return [Result(case.name, "to be measured", RED, note=reason)]
    results = [_of_bound(case.name, bound, points, baselines) for bound in case.reach]
    return results + [_of_invariant(case.name, name, points) for name in case.invariants]


def worst(outcomes: Iterable[str]) -> str:
    """The outcome of several results together; green where all of them are, or do not apply."""
    return min((one for one in outcomes if one in OUTCOMES), key=OUTCOMES.index, default=GREEN)


def outcome_of(bound: Bound, low: float, high: float) -> str:
    """The outcome for a value that lies in low..high."""
    if bound.most:
        return GREEN if high <= bound.limit else RED if low > bound.limit else UNSURE
    return GREEN if low >= bound.limit else RED if high < bound.limit else UNSURE


def _of_bound(case: str, bound: Bound, points: Sequence[Point], baselines: Mapping[str, Point]) -> Result:
    measured = _value(bound, points, baselines)
    if measured is None:
        return Result(case, str(bound), UNSURE, note=f"{bound.measure} has no value here")
    value, interval = measured
    if interval is None:
        return Result(case, str(bound), UNSURE, value, note="one value alone has no interval")
    return Result(case, str(bound), outcome_of(bound, *interval), value, *interval)


def _value(bound: Bound, points: Sequence[Point], baselines: Mapping[str, Point]) -> Value | None:
    """The value of a measure over all runs, and its interval; None where a point has none."""
    if bound.measure in ("speedup", "efficiency") and not bound.of_baseline:
        return _of_speedup(points, bound.measure == "efficiency")
    ours = samples(points, bound.measure)
    theirs: list[float] | None = [1.0] * len(ours or ())
    if bound.of_baseline:
        against = [point.compared_with.baseline for point in points if point.compared_with]
        theirs = samples([baselines[name] for name in against], bound.measure)
    if not ours or not theirs or not median(theirs):
        return None
    if bound.measure == START and bound.of_baseline:
        # A first start and those after it differ in what is compiled, so each is compared with its run's plain one.
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        return median(ratios), (min(ratios), max(ratios)) if len(ratios) > 1 else None
    return median(ours) / median(theirs), speedup_interval(ours, theirs)


def samples(points: Iterable[Point], measure: str) -> list[float] | None:
    """The values of a measure, one a repeat, or one a run of what is no repeat's; None where one is missing."""
    values = [value for point in points for value in _samples(point, measure)]
    return None if None in values else [float(value) for value in values if value is not None]


def _samples(point: Point, measure: str) -> list[float | None]:
    if measure == START:
        return [point.start_seconds]
    if measure == IDENTICAL:
        against = point.compared_with
        if against is None or against.identical is None or not against.outputs:
            return [None]
        return [against.identical / against.outputs] * 2
    return [getattr(tables.row(replace(point, repeats=(repeat,))), measure) for repeat in point.repeats]


def _of_speedup(points: Sequence[Point], over_predicted: bool) -> Value | None:
    """Speedup over the baseline of the same run; over_predicted: as a share of the cost model's."""
    ours = [speed for point in points for speed in point.tok_s]
    theirs = [speed for point in points if point.compared_with is not None for speed in point.compared_with.tok_s]
    known = [tables.row(point).predicted if over_predicted else 1.0 for point in points]
    predicted = [value for value in known if value]
    if not ours or not theirs or len(predicted) < len(known):
        return None
    scale = median(theirs) * median(predicted)
    interval = speedup_interval(ours, theirs)
    ends = None if interval is None else (interval[0] / median(predicted), interval[1] / median(predicted))
    return median(ours) / scale, ends


def _of_invariant(case: str, name: str, points: Sequence[Point]) -> Result:
    wish, counts = f"{name} none", []
    for point in points:
        counted: Mapping[str, Any] = point.engine.get(FOUND) or {}
        if name in counted.get("not_applicable", {}):
            return Result(case, wish, ABSENT, note=counted["not_applicable"][name])
        if name not in counted.get("measured", {}):
            return Result(case, wish, UNSURE, note="it was not counted")
        counts.append(int(counted["measured"][name]))
    return Result(case, wish, RED if max(counts) else GREEN, float(max(counts)))


@cache
def code() -> str:
    """A digest of all that is installed of selfspec: another one, another code."""
    root, made = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        made.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return made.hexdigest()[:12]


def place(device: str) -> dict[str, Any]:
    """Code, machine and versions, which have to be the same for two verdicts to say something of each other."""
    versions = {name: version for name, version in machine.versions().items() if name in machine.DECISIVE}
    return {"code": code(), "device": device, "cpu": machine.cpu(), "versions": versions}


def keep(results: str | os.PathLike[str], line: dict[str, Any]) -> Path:
    """Add a line, whole or not at all. Raises RecordError: it could not be written."""
    path = Path(results) / HISTORY
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one write of a line, which appends are atomic for
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return path


def history(results: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of a folder, the oldest first; a torn one is left out."""
    found = []
    with suppress(OSError):
        for line in archive.read_text(Path(results) / HISTORY).splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "outcome" in line]


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
    """Measure and judge; the verdict, which is also added to the folder's checks.jsonl. cfgs: one for each case of the
    file, all of one results folder; with a fault to plant one of its own. plant: a fault of `PLANTED` that every
    drafting engine gets. reuse_baseline: compare with baselines of earlier commands. Raises ConfigError: what the cfgs
    ask for cannot be had; RecordError: a point or the verdict could not be written."""
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
            "place": place(keys.device(cfgs[0])),
            "results": [asdict(one) for one in found],
            "points": [point.id for point in points],
            "planted": plant,
            "seconds": round(time.perf_counter() - began, 1),
        }
        return line | {"file": str(keep(folder, line))}

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
