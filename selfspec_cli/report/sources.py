"""What a report is made of: the points of one folder or of many, and what other commands left beside them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, folder, quality, tables
from selfspec_cli.record.columns import AcceptRow, Record, chosen
from selfspec_cli.record.point import Point
from selfspec_cli.record.targets import Target, targets_of
from selfspec_cli.stages.check import history

MOST_NAMED = 12  # other results of an archive without points


@dataclass
class Sources:
    """Everything that a page shows. rows, accepts: one for each point, in the same order (an accept row is None where
    nothing drafted). places: folder of each point, where there is more than one. curves: what `selfspec roc` wrote, by
    the place that it is from. checks: verdicts of `selfspec check`, the oldest first."""

    points: list[Point]
    rows: list[Record]
    accepts: list[AcceptRow | None]
    targets: list[Target] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    profiles: list[quality.Profile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)


def of_points(points: Sequence[Point], where: Sequence[str] = ()) -> Sources:
    """The rows and targets of points in memory that meet the conditions of `where`, and of their baselines."""
    rows = [*map(tables.row, points)]
    shown = chosen(rows, where)
    names = {row.point for row in shown} | {row.baseline for row in shown}
    kept = [point for point in points if point.id in names]
    rows = [row for row in rows if row.point in names]
    return Sources(kept, rows, [*map(tables.accept_row, kept)], targets_of(kept))


def folders(root: Path) -> list[Path]:
    """The results folders of a place: itself where it holds points, else every one below it, archives included."""
    if archive.is_folder(root / folder.RUNS):
        return [root]
    return [runs.parent for runs in archive.below(root, folder.RUNS) if archive.is_folder(runs)]


def read(root: str | Path, where: Sequence[str] = (), *, no_points: bool = False) -> Sources:
    """Read a results folder, or all that lie below a folder that is none itself. no_points: it may be without points;
    else ConfigError is raised, as where none meets the conditions `where`."""
    archive.expect(root, "results_dir")
    root = Path(root)
    points: list[Point] = []
    places: dict[str, str] = {}
    warnings: list[str] = []
    profiled: dict[str, quality.Profile] = {}
    checks: list[dict[str, Any]] = []
    for results in folders(root) or [root]:
        measured, strange = folder.read(results)
        profiled |= quality.newest_profiles(results)
        checks += history(results)
        points += measured
        warnings += strange
        places |= {point.id: archive.shown(results.relative_to(root)) for point in measured}
    if not points and not no_points:
        raise ConfigError("\n".join([_no_points(root), *warnings]))
    sources = of_points(folder.in_order(list({point.id: point for point in points}.values())), where)
    if points and not sources.points:
        raise ConfigError(f"none of the {len(points)} points is so: {' '.join(where)}")
    sources.places = [places[point.id] for point in sources.points]
    sources.warnings, sources.checks = warnings, sorted(checks, key=lambda line: str(line.get("run_id")))
    keys = {row.key for row in sources.rows}
    sources.profiles = [profile for profile in profiled.values() if not where or profile.key in keys]
    # What `selfspec roc` left beside the points.
    for file in archive.below(root / "roc" if archive.is_folder(root / folder.RUNS) else root, "curves.json"):
        try:
            place = [part for part in file.parent.relative_to(root).parts if part != "roc"]
            name = archive.shown("/".join(place) or root.resolve().name)
            sources.curves[name] = json.loads(archive.read_text(file))["panels"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sources.warnings.append(f"{file}: {' '.join(str(error).split())}; left out")
    return sources


def _no_points(root: Path) -> str:
    packed = archive.inside(root)
    if packed is None:
        return f"{root / folder.RUNS} holds no points yet; make some: selfspec sweep gate=varH tau_v=4,5,6"
    held = [file.relative_to(root).as_posix() for file in archive.contents(packed) if file.is_relative_to(root)]
    more = f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
    return (
        f"{root} holds no points to report, but these other results: {', '.join(held[:MOST_NAMED])}{more}. "
        f"To read one: xzcat {packed} | grep '\"{(root / held[0]).relative_to(packed).as_posix()}\"'"
    )
