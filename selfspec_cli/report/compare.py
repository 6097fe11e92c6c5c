"""Two sets of points side by side: arms of both, what differs, and whether speeds differ by more than noise."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from selfspec_cli.config.dumped import in_todays_words
from selfspec_cli.config.schema import ConfigError, RunConfig, flat, to_plain
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.record import archive, folder, tables
from selfspec_cli.record.columns import Record, chosen, known
from selfspec_cli.record.point import Point
from selfspec_cli.record.statistics import Interval, overlap, speedup_interval
from selfspec_cli.report import rows as names
from selfspec_cli.report import sources
from selfspec_cli.report.table import Format, as_csv, as_json, markdown

FASTER, SLOWER, NOISE, UNKNOWN = "faster", "slower", "within noise", "not known"
HEAD = ("arm", "A tok/s", "B tok/s", "B over A", "B is", "A speedup", "B speedup", "speedups", "A accept", "B accept")
MOST_VALUES = 4  # of a setting that differs, on one side
MOST_ARMS = 6  # of one side alone that are named
NOT_COMPARED = ("results_dir", "repeats")  # where a point lies, and how often it was measured, change no speed


@dataclass(frozen=True)
class Pair:
    """One arm on both sides. ratio: speed of B over A's, in the interval (None without repeats). runs: of each side."""

    arm: str
    where: str
    a: Record
    b: Record
    ratio: float | None
    interval: Interval | None
    runs: tuple[int, int]

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return UNKNOWN
        return FASTER if self.interval[0] > 1 else SLOWER if self.interval[1] < 1 else NOISE

    @property
    def of_speedups(self) -> str:
        """The same of the speedups over the baseline of each side, which a machine's drift moves less."""
        ours, theirs = names.interval(self.b), names.interval(self.a)
        if ours is None or theirs is None or self.b.arm == "baseline":
            return ""
        return "intervals overlap" if overlap(ours, theirs) else "greater" if ours[0] > theirs[1] else "smaller"


@dataclass
class Comparison:
    """differing: setting -> (values in A, values in B), over the arms of both. alone: arms of one side only."""

    a: str
    b: str
    pairs: list[Pair]
    differing: dict[str, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    alone: tuple[list[str], list[str]] = ([], [])
    warnings: list[str] = field(default_factory=list)

    @property
    def found(self) -> str:
        verdicts = [pair.verdict for pair in self.pairs]
        kinds = [verdict for verdict in (FASTER, SLOWER, NOISE, UNKNOWN) if verdict in verdicts]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in kinds)
        sure = len(verdicts) - verdicts.count(UNKNOWN)
        text = f"Of {len(verdicts)} arm(s) that both measured, with A = {self.a} and B = {self.b}, B is: {counts}."
        if sure >= 10 and sure != verdicts.count(NOISE):
            text += f" At 95 %, about {sure / 20:.0f} of {sure} would seem to differ by chance alone."
        if any(pair.interval is not None and min(pair.runs) < 2 for pair in self.pairs):
            text += " The noise is that of repeats within one run, and does not hold how runs differ from one another."
        if UNKNOWN in verdicts:
            text += " Where repeats were not kept, nothing says how much is noise."
        return text


def resolve(word: str, results: str | Path) -> tuple[list[Point], list[str]]:
    """The points that a word names: of a folder, or those of `results` with this git revision, machine, run or id;
    and warnings. Raises ConfigError where it names none."""
    if archive.is_folder(Path(word)):
        points, warnings = _all(Path(word))
        if points:
            return points, warnings
        raise ConfigError(f"{word} holds no points")
    points, warnings = _all(Path(results)) if archive.is_folder(Path(results)) else ([], [])
    if not points:
        why = f"and {results} holds no points, of which it could name a revision, a machine or a run"
        raise ConfigError(f"{word}: there is no such folder, {why}")
    if "/" in word:
        raise ConfigError(f"{word}: there is no such folder")
    ways: list[Callable[[Point], bool]] = [
        lambda point: len(word) >= 4 and point.id.startswith(word),
        lambda point: len(word) >= 4 and str((point.git or {}).get("revision", "")).startswith(word),
        lambda point: point.run_id == word,
        lambda point: word.lower() in point.device.lower(),
    ]
    for way in ways:
        if chosen := [point for point in points if way(point)]:
            return chosen, warnings
    values = {value for point in points for value in (point.device, point.revision[:10], point.run_id) if value}
    raise ConfigError(f"there is no folder {word}, and {closest(word, sorted(values), 'revision, machine or run')}")


def _all(root: Path) -> tuple[list[Point], list[str]]:
    read = [folder.read(place) for place in sources.folders(root)]
    warnings = [warning for _, doubts in read for warning in doubts]
    return folder.in_order([point for points, _ in read for point in points]), warnings


def compare(words: tuple[str, str], results: str | Path, where: Sequence[str] = ()) -> Comparison:
    """Compare the points that two words name, see `resolve`. where: conditions that rows must meet. Raises ConfigError
    where a word names nothing, or both have no arm in common."""
    sides, warnings = [], []
    for word in words:
        points, doubts = resolve(word, results)
        warnings += doubts
        by_id = {row.point: row for row in chosen(map(tables.row, points), where)}
        sides.append({point.id: (point, by_id[point.id]) for point in points if point.ok and point.id in by_id})
    return replace(between(words, [*sides[0].values()], [*sides[1].values()]), warnings=warnings)


Measured = tuple[Point, Record]


def between(words: tuple[str, str], ours: Sequence[Measured], theirs: Sequence[Measured]) -> Comparison:
    apart = _apart(ours, theirs)
    a, b = _by_arm(ours, apart), _by_arm(theirs, apart)
    both = [arm for arm in a if arm in b]
    if not both:
        raise ConfigError(f"{words[0]} and {words[1]} have no arm in common that was measured on both sides")
    pairs = [_pair(a[arm], b[arm], apart) for arm in both]
    differing = _differing([(a[arm][-1][0], b[arm][-1][0]) for arm in both])
    only_a, only_b = ([names.label(side[arm][-1][1]) for arm in side if arm not in both] for side in (a, b))
    return Comparison(*words, pairs, differing, (only_a, only_b))


def _apart(ours: Sequence[Measured], theirs: Sequence[Measured]) -> tuple[str, ...]:
    """Columns that have one value on each side, not the same one: they are what is compared, and tell no arms apart."""
    sides = [[_arm(point) for point, row in side if row.arm != "baseline"] for side in (ours, theirs)]
    apart = []
    for name in dict.fromkeys(name for arms in sides for arm in arms for name in arm):
        a, b = ({arm.get(name) for arm in arms} for arms in sides)
        if len(a) == len(b) == 1 and a != b:
            apart.append(name)
    return tuple(apart)


def _by_arm(side: Sequence[Measured], apart: Sequence[str]) -> dict[tuple[Any, ...], list[Measured]]:
    by_arm: dict[tuple[Any, ...], list[Measured]] = defaultdict(list)
    for point, row in side:
        arm = {name: value for name, value in _arm(point).items() if name not in apart}
        by_arm[tuple(sorted(arm.items()))].append((point, row))
    return dict(by_arm)


def _arm(point: Point) -> dict[str, Hashable]:
    """The columns that name an arm, with the defaults of those that are newer than the point."""
    defaults = DraftView.of(RunConfig()).columns() if point.arm["arm"] == "layer_skip" else {}
    values = known(defaults | point.arm)
    given = {name: value for name, value in values.items() if value is not None and name not in NOT_COMPARED}
    return {name: value if isinstance(value, Hashable) else repr(value) for name, value in given.items()}


def _pair(ours: list[Measured], theirs: list[Measured], apart: Sequence[str]) -> Pair:
    """Several runs on both sides: the medians of runs are what varies. Else the repeats of the newest run."""
    kept = [[point.tok_s for point, _ in side if point.tok_s] for side in (ours, theirs)]
    several = min(map(len, kept)) >= 2
    samples = [[*map(median, runs)] if several else [*runs[-1]] if runs else [] for runs in kept]
    a, b = ours[-1][1], theirs[-1][1]
    speeds = [median(sample) if all(samples) else row.tok_s_median for sample, row in zip(samples, (a, b), strict=True)]
    ratio = speeds[1] / speeds[0] if speeds[0] and speeds[1] else None
    interval = speedup_interval(samples[1], samples[0])
    runs = (len(kept[0]), len(kept[1])) if several else (1, 1)
    arm = names.label(b) + (f" ({', '.join(apart)} differ)" if apart and b.arm != "baseline" else "")
    return Pair(arm, names.group_title(b), a, b, ratio, interval, runs)


def _differing(pairs: Sequence[tuple[Point, Point]]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Every setting, version and fact of the machine that is not the same in some pair of points."""
    differing: dict[str, tuple[list[Any], list[Any]]] = {}
    for pair in pairs:
        left, right = map(facts, pair)
        for name in dict.fromkeys([*left, *right]):
            if left.get(name) != right.get(name):
                for values, side in zip(differing.setdefault(name, ([], [])), (left, right), strict=True):
                    if side.get(name) not in values:
                        values.append(side.get(name))
    return differing


def facts(point: Point) -> dict[str, Any]:
    """Everything that decides a speed, by dotted name: configuration, files, versions, machine, revision."""
    config = completed(in_todays_words(point.config), to_plain(RunConfig())) if point.config else {}
    values = {name: value for name, value in flat(config) if name not in NOT_COMPARED}
    values |= {f"digest of {name}": value for name, value in point.digests.items()}
    values |= {f"version of {name}": value for name, value in point.versions.items()}
    values |= {f"hardware {name}": value for name, value in flat(point.hardware or {})}
    return values | {"machine": point.device, "git revision": point.revision or None}


def completed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of newer settings, and without removed ones not in use."""
    complete: dict[str, Any] = {}
    for name, default in defaults.items():
        value = config.get(name, default)
        nested = isinstance(default, Mapping) and default and isinstance(value, Mapping)
        complete[name] = completed(value, default) if nested else value
    return complete | {name: value for name, value in config.items() if name not in defaults and value}


def text(comparison: Comparison, form: Format) -> str:
    if form is Format.json:
        return as_json(document(comparison))
    body = [_line(pair) for pair in comparison.pairs]
    if form is Format.csv:
        lines = [[pair.where, *line] for pair, line in zip(comparison.pairs, body, strict=True)]
        return as_csv([["workload", *HEAD], *lines])
    parts = [comparison.found]
    for where in dict.fromkeys(pair.where for pair in comparison.pairs):
        lines = [line for pair, line in zip(comparison.pairs, body, strict=True) if pair.where == where]
        parts += [f"### {where}", markdown(HEAD, lines)]
    rows = [[name, *map(_values, values)] for name, values in comparison.differing.items()]
    differing = ["### What differs", markdown(("setting", "A", "B"), rows)]
    parts += differing if rows else ["No setting, version or machine differs."]
    for side, arms in zip((comparison.a, comparison.b), comparison.alone, strict=True):
        if arms:
            more = ", ..." if len(arms) > MOST_ARMS else ""
            parts.append(f"{len(arms)} arm(s) of {side} alone: {', '.join(arms[:MOST_ARMS])}{more}")
    return "\n\n".join(parts) + "\n"


def document(comparison: Comparison) -> dict[str, Any]:
    pairs = []
    for pair in comparison.pairs:
        low, high = pair.interval or (None, None)
        about = {"arm": pair.arm, "workload": pair.where, "a": pair.a.point, "b": pair.b.point}
        speeds = {"a_tok_s": pair.a.tok_s_median, "b_tok_s": pair.b.tok_s_median}
        difference = {"ratio": pair.ratio, "low": low, "high": high, "verdict": pair.verdict, "runs": pair.runs}
        speedups = {"a_speedup": pair.a.speedup, "b_speedup": pair.b.speedup, "speedups": pair.of_speedups}
        pairs.append({**about, **speeds, **difference, **speedups})
    differing = {name: {"a": a, "b": b} for name, (a, b) in comparison.differing.items()}
    found = {"a": comparison.a, "b": comparison.b, "found": comparison.found, "pairs": pairs, "differing": differing}
    only_a, only_b = comparison.alone
    return found | {"only_a": only_a, "only_b": only_b, "warnings": comparison.warnings}


def _line(pair: Pair) -> list[str]:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.3f}"
    if pair.interval is not None:
        ratio += f" ({pair.interval[0]:.3f} to {pair.interval[1]:.3f})"
    speeds = [f"{row.tok_s_median:,.1f}" if row.tok_s_median else "" for row in (pair.a, pair.b)]
    accepts = [f"{row.accept_rate:.1%}" if row.accept_rate is not None else "" for row in (pair.a, pair.b)]
    speedups = map(names.times, (pair.a, pair.b))
    return [pair.arm, *speeds, ratio, pair.verdict, *speedups, pair.of_speedups, *accepts]


def _values(values: list[Any]) -> str:
    texts = ["not set" if value is None else str(value) for value in values]
    more = f" and {len(texts) - MOST_VALUES} more" if len(texts) > MOST_VALUES else ""
    return ", ".join(texts[:MOST_VALUES]) + more
