"""From a results folder to a page, figures and tables. Reads points, starts no engine and imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive
from selfspec_cli.report import sources
from selfspec_cli.report.sources import Sources

PAGE, FIGURES = "report.html", "figures"


def run(
    results: str | Path, out: str | Path, *, where: Sequence[str] = (), files: bool = False
) -> tuple[Sources, Path, list[Path]]:
    """Read the points of `results`, or of all folders below it, and write the page to `out`: what was read, the page,
    and the files of figures. Raises ConfigError where there are no points, or `out` cannot be written.

    where: conditions that rows must meet, see `record.query`. files: write each figure as SVG and PNG too.
    """
    found = sources.read(results, where)
    if archive.inside(out) is not None:
        raise ConfigError(f"{out} is an archive, which is only read; name a folder for the page: --out FOLDER")
    from selfspec_cli.report import export, figures, page

    drawn = figures.of_sources(found)
    html = Path(out) / PAGE
    try:
        page.write(found, drawn, html)
        return found, html, export.every(drawn, Path(out) / FIGURES) if files else []
    except OSError as error:
        raise ConfigError(
            f"{error.filename or html} cannot be written ({error.strerror}); name another folder: --out FOLDER"
        ) from error


def pictures(results: str | Path, out: str | Path) -> list[Path]:
    """Write the figures of a results folder as PNG to `out`; of each, the panel that has most points."""
    from selfspec_cli.report import export, figures

    files = []
    for figure in figures.of_sources(sources.read(results, no_points=True)):
        panel = max(figure.panels, key=lambda panel: len(panel.points))
        files.append(export.write(figure, panel, Path(out) / f"{figure.name}.png"))
    return files


def roc_figures(folder: Path) -> dict[str, str]:
    """Draw the curves that `selfspec roc` wrote to a folder, beside them; name -> path."""
    from selfspec_cli.report import export
    from selfspec_cli.report.figures import drafts

    panels = json.loads((folder / "curves.json").read_text(encoding="utf-8"))["panels"]
    files = export.every(drafts.roc({folder.name: panels}), folder)
    return {f"figure {number}": str(file) for number, file in enumerate(files, start=1) if file.suffix == ".png"}
