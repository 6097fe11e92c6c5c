"""What `selfspec report` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from selfspec_cli.commands import deploying
from selfspec_cli.commands.screen import emit, rows_document, say, warn
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive
from selfspec_cli.record import folder as results
from selfspec_cli.report import compare as comparing
from selfspec_cli.report import compared, make, sources, static
from selfspec_cli.report.formats import Format
from selfspec_cli.stages import preflight


def page(folder: Path, out: Path, where: Sequence[str], figures: bool, as_json: bool, reload: int = 0) -> None:
    """The tables on the terminal, the page in a file. reload: seconds after which it loads itself anew; 0: never."""
    made = make.run(folder, out, where=where, files=figures, reload=reload)
    warn(made.warnings)
    deploy = deploying.of_report(folder, out)
    if as_json:
        files = {"page": made.page, "figures": made.figures}
        return emit({"rows": rows_document(made.rows), **files, "warnings": made.warnings, "deploy": deploy})
    from selfspec_cli.report import table

    table.show(made.rows, Console(), made.targets)
    places = sources.folders(folder)
    if places != [folder]:
        say(f"{folder} holds no points of its own: these are of {len(places)} results folders below it")
    if made.figures:
        say(f"figures: {len(made.figures)} files in {made.figures[0].parent}")
    say(f"page: {made.page}")
    for one in deploy:
        say(f"\n{one['what']}", "bold") if "what" in one else None
        deploying.show(one)


def as_text(folder: Path, where: Sequence[str], form: Format) -> None:
    """The report in another format, to stdout."""
    found = sources.read(folder, where)
    warn(found.warnings)
    print(static.text(found, form), end="")


def compare(folder: Path, words: tuple[str, str], where: Sequence[str], form: Format) -> None:
    """Two sets of points side by side."""
    made = comparing.compare(words, folder, where)
    warn(made.warnings)
    if form is Format.html:
        compared.show(made, Console())
    else:
        print(compared.text(made, form), end="")


def export(folder: Path, out: Path | None, packed: Path | None) -> dict[str, Any]:
    """Make the tables of a folder or an archive, in `out` if that is named, or pack the folder; what was made.

    Raises:
        ConfigError: nothing was measured there, or it cannot be written to where it would be.
        RecordError: a table could not be written.
    """
    if packed is not None:
        if out is not None:
            raise ConfigError("--archive writes one file, and --out tables; ask for one of them")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name the one to pack: results_dir=FOLDER")
        return {"files": archive.pack(folder, packed), "archive": packed}
    if not archive.is_folder(folder / results.RUNS):
        raise ConfigError(f"{folder} holds no {results.RUNS}/: nothing was measured there")
    if out is not None:
        preflight.check_folder(str(out), "--out")
    count, warnings = results.export(folder, out)
    warn(warnings)
    place = out or folder
    return {"points": count, "tables": [str(place / name) for name in results.TABLES if (place / name).is_file()]}
