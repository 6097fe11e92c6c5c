"""From a results folder to a page, and to figures as files: SVG, and PNG of twice the size, without a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive
from selfspec_cli.report import sources
from selfspec_cli.whole import atomic_write, written

if TYPE_CHECKING:
    from selfspec_cli.report.figures.base import Figure, Panel

PAGE, FIGURES = "report.html", "figures"
MOST_PANELS = 24  # of one figure, as files


def run(
    results: str | Path, out: str | Path, *, where: Sequence[str] = (), files: bool = False
) -> tuple[sources.Sources, Path, list[Path]]:
    """Read the points of `results`, or of all folders below it, and write the page to `out`: what was read, the page,
    and the files of figures. Raises ConfigError where there are no points, or `out` cannot be written. where:
    conditions that rows must meet, see `record.columns`. files: write each figure as SVG and PNG too."""
    found = sources.read(results, where)
    if archive.inside(out) is not None:
        raise ConfigError(f"{out} is an archive, which is only read; name a folder for the page: --out FOLDER")
    from selfspec_cli.report import figures, page  # they import altair

    drawn = figures.of_sources(found)
    html = Path(out) / PAGE
    try:
        atomic_write(html, page.html(found, drawn))
        return found, html, every(drawn, Path(out) / FIGURES) if files else []
    except OSError as error:
        raise ConfigError(
            f"{error.filename or html} cannot be written ({error.strerror}); name another folder: --out FOLDER"
        ) from error


def pictures(results: str | Path, out: str | Path) -> list[Path]:
    """Write the figures of a results folder as PNG to `out`; of each, the panel that has most points."""
    from selfspec_cli.report import figures

    files = []
    for figure in figures.of_sources(sources.read(results, no_points=True)):
        panel = max(figure.panels, key=lambda panel: len(panel.points))
        files.append(write(figure, panel, Path(out) / f"{figure.name}.png"))
    return files


def roc_figures(folder: Path) -> dict[str, str]:
    """Draw the curves that `selfspec roc` wrote to a folder, beside them; name -> path."""
    from selfspec_cli.report.figures import drafts

    panels = json.loads((folder / "curves.json").read_text(encoding="utf-8"))["panels"]
    files = every(drafts.roc({folder.name: panels}), folder)
    return {f"figure {number}": str(file) for number, file in enumerate(files, start=1) if file.suffix == ".png"}


def drawing(figure: Figure, panel: Panel) -> dict[str, Any]:
    """One panel as a whole Vega-Lite specification, data included."""
    from selfspec_cli.report.figures.base import ROWS, WIDTH, config, with_panel

    spec = with_panel(figure.spec(), panel)
    for part in [spec, *spec.get("vconcat", [])]:
        if part.get("width") == "container":
            part["width"] = WIDTH
    title = {"text": figure.title, "subtitle": ", ".join(filter(None, (panel.group, panel.name)))}
    colours = config("#1f2933", "#55616e", "#d9dfe5")
    return spec | {"title": title, "datasets": {ROWS: panel.data}, "config": colours, "padding": 14}


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
            words = re.sub(r"[^a-z0-9]+", "-", f"{panel.group} {panel.name}".lower()).strip("-")[:80]
            stem = figure.name + (f"_{number:02}_{words}" if len(figure.panels) > 1 else "")
            files += [write(figure, panel, Path(folder) / f"{stem}.{kind}") for kind in ("svg", "png")]
    return files
