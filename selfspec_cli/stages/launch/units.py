"""A plan, cut into units that different workers can measure.

A unit is some engines of one family with all their points, and the family's baselines. The baselines are measured again
in each unit, because a candidate is only compared with a baseline that ran on the same GPU. So a family is cut into no
more units than there are workers for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.stages.plan import Family, Planned

ENDS = ".point.json"
"""Ends the name of a file in which a worker leaves a point."""


@dataclass(frozen=True)
class Unit:
    """What one worker measures, in this order.

    name: of its folder and log, unique in a command. ends: no point is begun later, in seconds since 1970, because a
    worker on another machine has a monotonic clock of its own.
    """

    name: str
    points: tuple[Planned, ...]
    ends: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs that its engines take."""
        return max(planned.cfg.model.tensor_parallel_size for planned in self.points)

    @property
    def devices(self) -> int:
        """What of `devices.free` it takes: a pair of cores, or its GPUs."""
        return 1 if device_of(self.points[0].cfg) == "cpu" else self.gpus


def description(unit: Unit, run_id: str) -> dict[str, Any]:
    """A unit as JSON: all that a worker on another machine has to know."""
    points = [
        {"config": to_plain(one.cfg), "key": one.key, "device": one.device, "digests": one.digests}
        for one in unit.points
    ]
    return {"run_id": run_id, "ends": unit.ends, "versions": _deciding(machine.versions()), "points": points}


def keys_of(document: Mapping[str, Any], cfgs: Sequence[RunConfig]) -> dict[str, str]:
    """By the key that a worker's own machine gives a point: the plan's key, where both mean the same point.

    They differ by the device alone where a worker has fewer cores of the driver's processor, and where the driver has
    no GPU, as on a cluster's login node. Under its own key the point would be measured again by the next command.
    """
    keys, found = Keys(), {}
    same_versions = document["versions"] == _deciding(machine.versions())
    for cfg, planned in zip(cfgs, document["points"], strict=True):
        here, there = keys.device(cfg), planned["device"]
        like = there == machine.describe([]) or here.rpartition(",")[0] == there.rpartition(",")[0] != ""
        if same_versions and like and keys.digests(cfg) == planned["digests"]:
            found[keys.run(cfg)] = planned["key"]
    return found


def _deciding(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name in machine.DECISIVE}


def cut(families: Sequence[Family], workers: int, ends: float | None = None) -> list[Unit]:
    """Units for `workers` workers, the largest first, so that the last ones to end are small.

    A family gets as many units as it has a share of all engines, and at least one. Its groups of points are dealt out,
    each to the unit that has the fewest points so far.
    """
    engines = sum(max(len(family.groups), 1) for family in families)
    made: list[tuple[Planned, ...]] = []
    for family in families:
        share = math.ceil(workers * len(family.groups) / engines) if engines else 1
        piles: list[list[list[Planned]]] = [[] for _ in range(max(min(share, len(family.groups)), 1))]
        for group in sorted(family.groups, key=len, reverse=True):
            min(piles, key=lambda pile: sum(map(len, pile))).append(group)
        made += [tuple(point for group in [family.baselines, *pile] for point in group) for pile in piles]
    ordered = sorted(filter(None, made), key=len, reverse=True)
    return [Unit(f"u{number}", points, ends) for number, points in enumerate(ordered)]


def rest(unit: Unit, finished: set[str], name: str) -> Unit | None:
    """What is left of a unit; None if nothing is. finished: keys of points that are on disk, measured or failed.

    Baselines stay as long as a candidate is left: the next worker may get another GPU.
    """
    candidates = [planned for planned in unit.points if not planned.is_baseline and planned.key not in finished]
    needed = {planned.baseline for planned in candidates}
    baselines = [planned for planned in unit.points if planned.is_baseline]
    points = [planned for planned in baselines if planned.key in needed or planned.key not in finished]
    return replace(unit, name=name, points=(*points, *candidates)) if points or candidates else None
