"""A plan, cut into units that different workers can measure.

A unit is some engines of one family with all their points, and the family's baselines. The baselines are measured again
in each unit, because a candidate is only compared with a baseline that ran on the same GPU. So a family is cut into no
more units than there are workers for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.schema import to_plain
from selfspec_cli.stages.plan import Family, Planned

ENDS = ".point.json"
"""Ends the name of a file in which a worker leaves a point."""


@dataclass(frozen=True)
class Unit:
    """What one worker measures, in this order. name: of its folder and log, unique in a command."""

    name: str
    points: tuple[Planned, ...]

    @property
    def gpus(self) -> int:
        """GPUs that its engines take."""
        return max(planned.cfg.model.tensor_parallel_size for planned in self.points)


def description(unit: Unit, run_id: str) -> dict[str, Any]:
    """A unit as JSON: all that a worker on another machine has to know."""
    return {"run_id": run_id, "points": [to_plain(planned.cfg) for planned in unit.points]}


def cut(families: Sequence[Family], workers: int) -> list[Unit]:
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
    return [Unit(f"u{number}", points) for number, points in enumerate(ordered)]


def rest(unit: Unit, finished: set[str], name: str) -> Unit | None:
    """What is left of a unit; None if nothing is. finished: keys of points that are on disk, measured or failed.

    Baselines stay as long as a candidate is left: the next worker may get another GPU.
    """
    candidates = [planned for planned in unit.points if not planned.is_baseline and planned.key not in finished]
    needed = {planned.baseline for planned in candidates}
    baselines = [planned for planned in unit.points if planned.is_baseline]
    points = [planned for planned in baselines if planned.key in needed or planned.key not in finished]
    return Unit(name, (*points, *candidates)) if points or candidates else None
