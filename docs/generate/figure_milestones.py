"""The milestones of the first sprint: what its plan expected, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from figure_cells import percent, points_of, ratio, table

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.targets import Target, experiments_of, targets_of
from selfspec_cli.report.rows import label
from selfspec_cli.report.table import wish

POINTS = "sprint/milestones"


def milestones(place: str = POINTS) -> str:
    """Write the arms of which the plan expected something, and the tuned one, each with the target of its experiment.

    A speedup is the one that accepted tokens and bytes imply, because other programs ran beside these points.
    """
    points = [point for point in points_of(place) if point.ok]
    targets = targets_of(points)
    read, layer = next(
        (point.engine["step_bytes"], point.arm["E"]) for point in points if point.engine.get("step_bytes")
    )
    rows: list[tuple[Any, ...]] = []
    for point in points:
        row = tables.row(point)
        (experiment,) = experiments_of(point)
        milestone, expected = experiment.partition("_")[0], _wanted(experiment, row, targets)
        if not expected and milestone != "m5":
            continue
        rows.append(
            (
                milestone,
                label(row),
                expected,
                ratio(_by_bytes(row, read, layer)),
                percent(row.accept_rate),
                None if row.delta_ppl is None or row.arm != "skip" else f"{row.delta_ppl:+.2f}",
            )
        )
    header = (
        "milestone",
        "arm",
        "expected",
        "by bytes read",
        "accept rate",
        "ΔPPL of library code",
    )
    return table(header, sorted(rows, key=lambda row: row[0]))


def _by_bytes(row: Record, read: Mapping[str, float], layer: int) -> float | None:
    """A speedup by counts alone: the cost model's of an arm that verifies, and of skip the bytes of a step that it reads.

    read, layer: bytes of a step, and the exit, of an arm of that model that drafts with its own first layers. The cache
    of keys and values tells how many layers there are: the draft reads `layer` of them.
    """
    if row.arm == "layer_skip":
        return row.predicted
    if row.E is None:
        return 1.0
    layers = layer * read["full_kv_token"] / read["draft_kv_token"]
    one_layer = (read["full"] - read["draft"]) / (layers - layer)
    return read["full"] / (read["full"] - (layers - row.E) * one_layer)


def _wanted(experiment: str, row: Record, targets: list[Target]) -> str:
    """What the plan wanted of an arm. A speed is wanted as a speedup, and of the baseline nothing can be."""
    matching = [one for one in targets if one.experiment == experiment and one.is_for(row) and row.arm != "baseline"]
    return ", ".join(wish(name, low, high) for one in matching for name, (low, high) in one.values.items())
