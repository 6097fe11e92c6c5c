"""Whether points reach what a performance check asks for: green, red, or not measurable; and the history of verdicts.

A value is that of all repeats of all runs, with its 95 % interval (`record.statistics`). It is green where the whole
interval reaches the limit, red where none of it does, and else not measurable: more repeats may tell.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.record import archive, tables
from selfspec_cli.record.folder import explained
from selfspec_cli.record.point import Point, median
from selfspec_cli.record.statistics import speedup_interval
from selfspec_cli.stages.check.file import IDENTICAL, START, Bound, Case

GREEN, RED, UNSURE, ABSENT = "green", "red", "not measurable", "not applicable"
OUTCOMES = (RED, UNSURE, GREEN)
"""The worst first; what is not applicable decides nothing."""
HISTORY = "checks.jsonl"
"""Verdicts of a results folder, run after run: lines of JSON, which are only ever added to."""
FOUND = "invariants"
"""Where `Point.engine` keeps what `Watch.stop` answered."""


Value = tuple[float, tuple[float, float] | None]
"""A value and its interval."""


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
    root, made = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        made.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return made.hexdigest()[:12]


def place(device: str) -> dict[str, Any]:
    """Code, machine and versions, which have to be the same for two verdicts to say something of each other."""
    versions = {name: version for name, version in machine.versions().items() if name in machine.DECISIVE}
    return {"code": code(), "device": device, "cpu": machine.cpu(), "versions": versions}


def keep(results: str | os.PathLike[str], line: dict[str, Any]) -> Path:
    """Add a line, whole or not at all. Raises RecordError: it could not be written."""
    archive.refuse(results)
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
