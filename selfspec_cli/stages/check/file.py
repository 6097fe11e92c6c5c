"""The file of a performance check (experiments/checks/NAME.yaml): arms, workloads, and what each of them must reach."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.paths import checked_mapping, read_yaml
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.counters import INVARIANTS
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record.targets import NUMBERS, less_is_better

START, IDENTICAL = "start_seconds", "identical_share"
MEASURES = (*NUMBERS, START, IDENTICAL)
"""What can be asked for: the columns of a row that are numbers, seconds that an engine took to start, and the share of
outputs that are the baseline's, token for token."""
OF_BASELINE = "of_baseline"
RUNS = 3


@dataclass(frozen=True)
class Bound:
    """A measure must be `limit` at least, or at most where less is better. of_baseline: the limit is for the ratio of
    the measure to the baseline's."""

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
    """A whole file. runs: of one point, at most, before it counts as not measurable. served: the arms are servers,
    asked over HTTP. digest: of the file's content."""

    name: str
    title: str
    cases: tuple[Case, ...]
    runs: int
    served: bool
    digest: str


def read(path: Path) -> CheckFile:
    """A file as a CheckFile. Raises ConfigError: it cannot be read, or says something that is not understood; the
    message names the place."""
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
