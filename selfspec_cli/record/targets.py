"""What a user wanted to reach: the targets that experiment files state, each with its source.

A target stands in the file of the experiment, so it is shown beside the points that this experiment measured and beside
no others. It decides nothing: nothing is measured, chosen or refused because of one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.config.choices import EXPERIMENT, experiment_targets
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record.columns import KINDS, Record
from selfspec_cli.record.point import Point

NUMBERS = [name for name, kind in KINDS.items() if kind.startswith(("int", "float"))]
_LESS_IS_BETTER = re.compile(r".*_(ms|w|mib)|.*ppl.*|failed_requests")
OF_BASELINE = "baseline_tok_s"

Range = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """What one arm of an experiment is to reach. arm: columns of a row that say which arm is meant. values: column ->
    (least, greatest) wanted; a single number is both. source: who stated it, and where."""

    experiment: str
    arm: dict[str, Any]
    values: dict[str, Range] = field(default_factory=dict)
    source: str = ""

    def is_for(self, row: Record) -> bool:
        """Whether `row` is the arm that is meant. Acceptance that was set reaches no target."""
        return row.acceptance_length is None and all(getattr(row, name) == value for name, value in self.arm.items())

    def reached(self, row: Record, name: str) -> bool | None:
        """Whether a row has reached one value; None where it was not measured."""
        value, (low, high) = getattr(row, name), self.values[name]
        return None if value is None else bool(value <= high if less_is_better(name) else value >= low)


def less_is_better(column: str) -> bool:
    """Whether the smaller value of a column is the better one: times, perplexity, power, memory, money and failures."""
    return _LESS_IS_BETTER.fullmatch(column) is not None


def targets_of(points: Iterable[Point]) -> list[Target]:
    """The targets of the experiments that measured these points; raises ConfigError for a wrong one."""
    names = dict.fromkeys(name for point in points for name in experiments_of(point))
    return [_target(name, stated) for name in names for stated in experiment_targets(name)]


def experiments_of(point: Point) -> list[str]:
    """The experiments that the command of a point names."""
    words = [word.partition("=") for word in point.command or []]
    return [name for key, _, value in words if key == EXPERIMENT for name in value.split(",")]


def _target(experiment: str, stated: dict[str, Any]) -> Target:
    """A target as written: `for`, `source`, and a column a key; `baseline_tok_s` makes of `tok_s` a speedup."""
    place = f"experiment {experiment}, targets"
    given = dict(stated)
    arm, source, baseline = given.pop("for", {}), str(given.pop("source", "")), given.pop(OF_BASELINE, None)
    if not isinstance(arm, dict):
        raise ConfigError(f"{place}: `for` must map columns to values, such as {{gate: varH, threshold: 5}}")
    if unknown := [name for name in arm if name not in KINDS]:
        raise ConfigError(f"{place}: {closest(unknown[0], KINDS, 'column')}")
    if "tok_s" in given:
        given["tok_s_median"] = given.pop("tok_s")
    values = {}
    for name, value in given.items():
        if name not in NUMBERS:
            raise ConfigError(f"{place}: {closest(name, ['for', 'source', OF_BASELINE, 'tok_s', *NUMBERS], 'key')}")
        values[name] = _range(value, f"{place}: {name}")
    if baseline is not None and "tok_s_median" in values:
        # Of another model on another machine: what carries over is the ratio.
        low, high = values.pop("tok_s_median")
        divisor = _range(baseline, f"{place}: {OF_BASELINE}")[0]
        values = {"speedup": (low / divisor, high / divisor)} | values
    return Target(experiment, arm, values, source)


def _range(value: Any, where: str) -> Range:
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= 2 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ConfigError(f"{where}={value!r}: write one number, or the least and the greatest as [low, high]")
    return float(numbers[0]), float(numbers[-1])
