"""Figures as files, for a paper, a pull request or a tracker: SVG, and PNG of twice the size. Needs no browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from selfspec_cli.report.figures.base import ROWS, Figure, Panel, with_panel
from selfspec_cli.whole import written

WIDTH = 760  # pixels
MOST_PANELS = 24  # of one figure, as files


def config(ink: str, muted: str, line: str) -> dict[str, Any]:
    """How charts look, in three colours: of text, of the text of axes, and of lines."""
    return {
        "background": "#ffffff",
        "font": "sans-serif",
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
        "tick": {"color": ink},
        "view": {"stroke": None},
        "title": {"anchor": "start", "color": ink, "subtitleColor": muted, "fontSize": 15, "offset": 12},
        "axis": {
            "labelColor": muted,
            "titleColor": muted,
            "gridColor": line,
            "domain": False,
            "ticks": False,
            "titleFontWeight": "normal",
            "labelFontSize": 12,
            "titleFontSize": 12,
            "labelPadding": 6,
        },
        "legend": {
            "labelColor": ink,
            "labelFontSize": 12,
            "labelLimit": WIDTH,
            "symbolType": "circle",
            "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
        },
    }


def drawing(figure: Figure, panel: Panel) -> dict[str, Any]:
    """One panel as a whole Vega-Lite specification, data included."""
    spec = with_panel(figure.spec(), panel)
    for part in [spec, *spec.get("vconcat", [])]:
        if part.get("width") == "container":
            part["width"] = WIDTH
    subtitle = ", ".join(filter(None, (panel.group, panel.name)))
    return spec | {
        "title": {"text": figure.title, "subtitle": subtitle},
        "datasets": {ROWS: panel.data},
        "config": config("#1f2933", "#55616e", "#d9dfe5"),
        "padding": 14,
    }


def write(figure: Figure, panel: Panel, file: Path) -> Path:
    """Write one panel as SVG or PNG, as the name of the file ends; its folder too."""
    import vl_convert

    spec = drawing(figure, panel)
    if file.suffix == ".svg":
        content = vl_convert.vegalite_to_svg(spec, show_warnings=False).encode()
    else:
        content = vl_convert.vegalite_to_png(spec, scale=2, show_warnings=False)
    with written(file) as part:
        part.write_bytes(content)
    return file


def every(figures: list[Figure], folder: str | Path) -> list[Path]:
    """Write each panel of each figure as SVG and PNG, at most MOST_PANELS of a figure; the paths."""
    files = []
    for figure in figures:
        for number, panel in enumerate(figure.panels[:MOST_PANELS], start=1):
            stem = figure.name + (f"_{number:02}_{_slug(panel)}" if len(figure.panels) > 1 else "")
            files += [write(figure, panel, Path(folder) / f"{stem}.{kind}") for kind in ("svg", "png")]
    return files


def _slug(panel: Panel) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{panel.group} {panel.name}".lower()).strip("-")[:80]
