"""One self-contained HTML page: what was found, figures, a table of all points, targets, what produced it.

The template is Jinja2's, the charts are Vega-Lite's, the table is DataTables'; their code is inside the page, which
makes no request. Code and data are packed (gzip), and the browser unpacks them.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from typing import Any

from selfspec_cli import __version__
from selfspec_cli.config.schema import flat
from selfspec_cli.record.columns import Record, header, meanings
from selfspec_cli.record.point import Point
from selfspec_cli.record.targets import less_is_better
from selfspec_cli.report.figures.base import Figure, Panel, config, sig
from selfspec_cli.report.rows import groups, label, latest, overview
from selfspec_cli.report.sources import Sources
from selfspec_cli.report.table import provenance, wish
from selfspec_cli.whole import atomic_write, cache_dir

LIMIT = 3_000_000  # bytes of a page
CONFIG = config("var(--ink)", "var(--muted)", "var(--line)") | {
    "background": None,
    "font": 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif',
}
"""Of the charts: in the colours of the page, light or dark, which its style sheet names."""
MOST_SENTENCES = 60
MOST_CHECKS = 40
MOST_PANELS = (300, 60, 12)  # of one figure: fewer where more do not fit


def html(sources: Sources, figures: list[Figure]) -> str:
    """The page as text; it makes no request, and is at most LIMIT long if points are not too many for it."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("selfspec_cli.report")
    templates = Environment(loader=loader, autoescape=select_autoescape(), trim_blocks=True)
    together = groups(sources.rows)
    places = {row.point: place for place, row in enumerate(sources.rows)}
    templates.filters["plain"] = lambda text: text.replace("`", "")
    show = templates.get_template("page.html").render
    several = together if len(together) > 1 else []
    headlines = [f"{group.title}, {group.rows[0].device}: {group.headline}" for group in several]
    words = {
        "version": __version__,
        "lead": overview(together),
        "sentences": headlines[:MOST_SENTENCES],
        "more": max(0, len(headlines) - MOST_SENTENCES),
        "targets": targets(sources),
        "facts": provenance(sources.points),
        "counts": {"points": len(sources.points), "failed": sum(not point.ok for point in sources.points)},
        "warnings": sources.warnings,
        "checks": checks(sources),
        "code": code(),
        "options": _options,
    }
    document: dict[str, Any] = {"table": table(sources), "details": details(sources), "config": CONFIG}
    page = ""
    for most in MOST_PANELS:
        shown = [limited(figure, most) for figure in figures]
        document["figures"] = [_figure(figure, places) for figure in shown]
        data = packed(json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
        page = show(words | {"figures": shown, "data": data})
        if len(page.encode()) <= LIMIT:
            break
    return page


def limited(figure: Figure, most: int) -> Figure:
    """Keep the `most` panels with the most points, and say in the caption how many were dropped."""
    if len(figure.panels) <= most:
        return figure
    kept = {id(panel) for panel in sorted(figure.panels, key=lambda panel: -len(panel.points))[:most]}
    left_out = (
        f" {most} of {len(figure.panels):,} panels are here, those of most points; the table has all points, "
        "and selfspec report --where makes a page of some."
    )
    panels = [panel for panel in figure.panels if id(panel) in kept]
    return replace(figure, about=figure.about + left_out, panels=panels)


def _figure(figure: Figure, places: dict[str, int]) -> dict[str, Any]:
    panels = [
        {
            "note": panel.note,
            "axis": panel.axis,
            "colours": panel.colours,
            "title": ", ".join(filter(None, (panel.group, panel.name))),
            "origin": _origin(panel),
            "rows": [row | {"point": places[row["point"]]} if "point" in row else row for row in panel.data],
            "points": [places[point] for point in panel.points],
        }
        for panel in figure.panels
    ]
    return {"name": figure.name, "spec": figure.spec(), "panels": panels}


def _options(figure: Figure) -> list[tuple[str, list[tuple[int, str]]]]:
    by_group: dict[str, list[tuple[int, str]]] = {}
    for number, panel in enumerate(figure.panels):
        by_group.setdefault(panel.group, []).append((number, panel.name))
    return list(by_group.items())


def _origin(panel: Panel) -> str:
    """How many points a panel is made of, and when they were measured, by the run ids in their names."""
    days = sorted({point.split("-")[1] for point in panel.points})
    when = [f"{day[:4]}-{day[4:6]}-{day[6:]}" for day in dict.fromkeys([*days[:1], *days[-1:]])]
    return f"From {len(panel.points)} point{'s' * (len(panel.points) > 1)}, measured {' to '.join(when)}"


def targets(sources: Sources) -> list[dict[str, str]]:
    """Each value that an experiment wanted, beside the best that its points reached."""
    shown = []
    for target in sources.targets:
        rows = [row for row in latest(sources.rows) if target.is_for(row)]
        arm = ", ".join(f"{name}={value}" for name, value in target.arm.items())
        for name, (low, high) in target.values.items():
            measured = [value for row in rows if (value := getattr(row, name)) is not None]
            reached = any(target.reached(row, name) for row in rows)
            best = (min if less_is_better(name) else max)(measured) if measured else None
            about = {"experiment": target.experiment, "arm": arm, "source": target.source}
            measured_best = "not measured" if best is None else f"{best:.4g}"
            answer = "" if best is None else "yes" if reached else "no"
            shown.append(about | {"target": wish(name, low, high), "measured": measured_best, "reached": answer})
    return shown


def checks(sources: Sources) -> list[dict[str, Any]]:
    """Verdicts of performance checks, the newest first, and what decided those that are not green."""
    shown = []
    for line in sources.checks[: -MOST_CHECKS - 1 : -1]:
        deciding = [result for result in line["results"] if result["outcome"] == line["outcome"] != "green"]
        words = [
            f"{result['case']}: {result['asked']}" + (f", {result['value']:.3g}" if result["value"] is not None else "")
            for result in deciding
        ]
        more = f" and {len(words) - 3} more" if len(words) > 3 else ""
        shown.append(line | line["place"] | {"because": "; ".join(words[:3]) + more})
    return shown


def code() -> dict[str, str]:
    """The libraries of the page, packed: `vega` (with Vega-Lite and Vega-Embed), `table` and its `table_style`."""
    bundle = resources.files("itables").joinpath("html")
    table, style = (packed(bundle.joinpath(f"dt_bundle.{kind}").read_text(encoding="utf-8")) for kind in ("js", "css"))
    return {"vega": _vega(), "table": table, "table_style": style}


def _vega() -> str:
    """Vega's code, packed. To bundle it takes seconds, so it is kept for the next page."""
    from importlib.metadata import version

    file = cache_dir() / f"vega-{version('vl-convert-python')}.gz.b64"
    if file.is_file():
        return file.read_text(encoding="ascii")
    import vl_convert

    text = packed(vl_convert.javascript_bundle(None))  # type: ignore[arg-type] # None: all of Vega as globals
    with suppress(OSError):  # else the next page takes as long again
        atomic_write(file, text)
    return text


def packed(text: str) -> str:
    """Text as gzip in base64; equal texts are packed equally."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


SHOWN = ["arm", "tok_s_median", "speedup", "speedup_low", "speedup_high", "accept_rate", "mean_accepted_len", "ttft_ms"]
SHOWN += ["tpot_ms", "delta_ppl", "identical", "verdict", "batch", "model", "device", "status"]
"""Columns that are visible before a reader chooses others; all that hold something can be chosen."""
TITLES = {"tok_s_median": "tok/s", "tok_s_min": "slowest", "tok_s_max": "fastest", "speedup_low": "low"}
TITLES |= {"speedup_high": "high", "accept_rate": "accepted", "mean_accepted_len": "tok/step", "ttft_ms": "TTFT ms"}
TITLES |= {"tpot_ms": "TPOT ms", "itl_ms": "ITL ms", "e2e_ms": "E2E ms", "delta_ppl": "ΔPPL", "ppl": "PPL"}
TITLES["device"] = "machine"  # other columns have their names
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
    values: dict[str, list[Any]] = {name: [getattr(row, name) for row in sources.rows] for name in names}
    values["arm"] = [label(row) for row in sources.rows]
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
            "values": [sig(cell) if isinstance(cell, float) else cell for cell in cells],
        }
        for name, cells in values.items()
        if any(cell is not None for cell in cells)
    ]
    return {"columns": columns, "points": [row.point for row in sources.rows]}


def details(sources: Sources) -> dict[str, Any]:
    """What each row opens: sections, each its title and places in `pool`: texts, or pairs of name and text."""
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
    return [
        [name, "not set" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)]
        for name, value in values.items()
    ]
