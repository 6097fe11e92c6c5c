"""What a sweep will do, before it does it: which points share an engine, which are finished, how long it may take.

A family is one model on one engine setting. Its baselines are measured first, on one engine; then every group of points
that differ only in gate, threshold or workload on one more: `gate=varH tau_v=4,5,6` opens two engines.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError, RunConfig, flat, to_plain
from selfspec_cli.record import tables
from selfspec_cli.record.point import Point

COMPARABLE = ("model", "workload", "batch", "input_len", "output_len", "repeats")
"""Points that agree in these, in what a load test asks and in the device take about as long."""

NOT_SHOWN = ("workload", "seed", "repeats")  # columns that neither a row's label nor its table's title shows


@dataclass(frozen=True)
class Planned:
    """A config with its keys, worked out once: what a file holds when the plan is made is what is measured. baseline:
    key of what it is compared with; its own for a baseline. arm: key of the arm, whatever the workload."""

    cfg: RunConfig
    key: str
    baseline: str
    digests: dict[str, str]
    device: str
    arm: str = ""

    @property
    def is_baseline(self) -> bool:
        return self.key == self.baseline


@dataclass
class Family:
    """One model on one engine setting: baselines that share an engine, then groups of points that share one each."""

    baselines: list[Planned]
    groups: list[list[Planned]]

    @property
    def engines(self) -> list[list[Planned]]:
        """Points by the engine that they share, in the order in which the engines start."""
        return [group for group in [self.baselines, *self.groups] if group]


@dataclass
class Plan:
    """What a sweep will do. skipped: points that an earlier run finished. reused: by key, baselines of earlier
    commands. seconds: how long it may take, by comparable points of the folder; None where it has none."""

    families: list[Family]
    skipped: list[Planned] = field(default_factory=list)
    reused: dict[str, Point] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def engines(self) -> list[list[Planned]]:
        """As of a family, of all of them."""
        return [group for family in self.families for group in family.engines]

    @property
    def points(self) -> list[Planned]:
        return [planned for group in self.engines for planned in group]


def plan(
    cfgs: Iterable[RunConfig],
    known: Sequence[Point] = (),
    *,
    again: bool = False,
    reuse_baseline: bool = False,
    retry_failed: bool = False,
) -> Plan:
    """Group points by the engine they can share. known: points of the folder; measured ones are skipped, unless
    `again`, and comparable ones say how long others may take. A baseline is measured again, because machines drift;
    reuse_baseline: take the newest with the right key. retry_failed: only points that no command could measure yet."""
    keys = Keys()
    measured = {point.key: point for point in known if point.ok}
    failed = {point.key for point in known} - measured.keys()
    families: dict[str, Family] = {}
    seen: set[str] = set()
    groups: dict[str, list[Planned]] = {}
    result = Plan([])
    for cfg in cfgs:
        base_key, base = keys.baseline(cfg)
        planned = Planned(cfg, keys.run(cfg), base_key, keys.digests(cfg), keys.device(cfg), keys.arm(cfg))
        if planned.key in measured and not again:
            result.skipped.append(planned)
            continue
        if retry_failed and planned.key not in failed:
            continue
        family = families.setdefault(keys.engine(base), Family([], []))
        earlier = measured.get(base_key) if reuse_baseline and not planned.is_baseline else None
        if earlier is not None and earlier.seconds is not None:  # else its repeats were not kept
            result.reused[base_key] = earlier
        elif base_key not in seen:
            seen.add(base_key)
            family.baselines.append(
                Planned(base, base_key, base_key, keys.digests(base), planned.device, keys.arm(base))
            )
        if planned.is_baseline:
            continue
        engine = keys.engine(cfg)
        if engine not in groups:
            family.groups.append(groups.setdefault(engine, []))
        groups[engine].append(planned)
    result.families = list(families.values())
    result.seconds = expected_seconds(result.engines, known)
    return result


def expected_seconds(engines: Sequence[Sequence[Planned]], known: Sequence[Point]) -> float | None:
    """Seconds that points on these engines may take, by medians of comparable ones and of starts; None without them."""
    times: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for point in known:
        if point.ok and point.seconds is not None and point.start_seconds is not None:
            times.setdefault(_comparable(point.arm, point.device), []).append((point.seconds, point.start_seconds))
    medians = {name: [*map(statistics.median, zip(*some, strict=True))] for name, some in times.items()}
    total = 0.0
    for group in engines:
        for number, planned in enumerate(group):
            median = medians.get(_comparable(tables.identity(planned.cfg), planned.device))
            if median is None:
                return None
            total += sum(median if number == 0 else median[:1])
    return total


def _comparable(arm: Mapping[str, Any], device: str) -> tuple[Any, ...]:
    return (device, *(arm.get(name) for name in COMPARABLE), load_patterns.comparable(arm))


def distinguishing_settings(points: Iterable[Planned]) -> dict[str, str]:
    """For points whose rows would look alike: the overrides that tell them apart, by run key; else empty."""
    alike: dict[tuple[Any, ...], list[Planned]] = defaultdict(list)
    for planned in points:
        shown = tables.identity(planned.cfg).items()
        alike[tuple(item for item in shown if item[0] not in NOT_SHOWN)].append(planned)
    texts = {planned.key: "" for same in alike.values() for planned in same}
    for same in (points for points in alike.values() if len(points) > 1):
        settings = [{name: value for name, value in flat(to_plain(one.cfg)) if value != {}} for one in same]
        names = dict.fromkeys(name for own in settings for name in own)
        differing = [name for name in names if any(own.get(name) != settings[0].get(name) for own in settings)]
        for planned, own in zip(same, settings, strict=True):
            values = {name: "null" if own.get(name) is None else own[name] for name in differing}
            texts[planned.key] = " ".join(f"{name}={value}" for name, value in values.items())
    return texts


def results_dir(cfgs: Sequence[RunConfig]) -> str:
    """The one folder that all points write to. Raises ConfigError: they name more than one."""
    folders = sorted({cfg.results_dir for cfg in cfgs})
    if len(folders) != 1:
        raise ConfigError(f"results_dir={','.join(folders)}: one command writes to one folder")
    return folders[0]
