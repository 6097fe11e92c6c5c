"""One self-contained HTML page: what was found, figures, a table of all points, targets, what produced it.

The template is Jinja2's, the charts are Vega-Lite's, the table is DataTables'; their code is inside the page, which
makes no request. Code and data are packed (gzip), and the browser unpacks them.
"""

from __future__ import annotations

import base64
import gzip
import json
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from selfspec_cli import __version__
from selfspec_cli.record.targets import less_is_better
from selfspec_cli.report import details
from selfspec_cli.report.figures.base import Figure, Panel, config
from selfspec_cli.report.rows import groups, latest, overview
from selfspec_cli.report.sources import Sources
from selfspec_cli.report.table import wish
from selfspec_cli.whole import atomic_write, cache_dir

LIMIT = 3_000_000  # bytes of a page
CONFIG = config("var(--ink)", "var(--muted)", "var(--line)") | {
    "background": None,
    "font": 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif',
}
"""Of the charts: in the colours of the page, light or dark, which its style sheet names."""
MOST_SENTENCES = 60
MOST_CHECKS = 40
MOST_PANELS = (300, 60, 12)
"""Of one figure: fewer where more do not fit."""


def html(sources: Sources, figures: list[Figure]) -> str:
    """The page as text; it makes no request, and is at most LIMIT long if points are not too many for it."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("selfspec_cli.report")
    templates = Environment(loader=loader, autoescape=select_autoescape(), trim_blocks=True)
    together = groups(sources.rows)
    places = {row.point: place for place, row in enumerate(sources.rows)}
    templates.filters["plain"] = lambda text: text.replace("`", "")
    show = templates.get_template("page.html").render
    headlines = [f"{group.title}, {group.rows[0].device}: {group.headline}" for group in together]
    headlines = headlines if len(headlines) > 1 else []
    words = {
        "version": __version__,
        "lead": overview(together),
        "sentences": headlines[:MOST_SENTENCES],
        "more": max(0, len(headlines) - MOST_SENTENCES),
        "targets": targets(sources),
        "facts": details.provenance(sources.points),
        "counts": {"points": len(sources.points), "failed": sum(not point.ok for point in sources.points)},
        "warnings": sources.warnings,
        "checks": checks(sources),
        "code": code(),
        "options": _options,
    }
    document: dict[str, Any] = {"table": details.table(sources), "details": details.details(sources), "config": CONFIG}
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
            found = {
                "target": wish(name, low, high),
                "measured": "not measured" if best is None else f"{best:.4g}",
                "reached": "" if best is None else "yes" if reached else "no",
            }
            shown.append(about | found)
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
    return {
        "vega": _vega(),
        "table": packed(bundle.joinpath("dt_bundle.js").read_text(encoding="utf-8")),
        "table_style": packed(bundle.joinpath("dt_bundle.css").read_text(encoding="utf-8")),
    }


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


def write(sources: Sources, figures: list[Figure], file: Path) -> None:
    atomic_write(file, html(sources, figures))
