"""`selfspec export`: tables and archives of a results folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.screen import emit, guard, warn
from selfspec_cli.commands.shared import Debug, Folder, Json, command
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive
from selfspec_cli.record import folder as results
from selfspec_cli.stages import preflight


@command(
    epilog="Examples: selfspec export results_dir=results/mine   ·   selfspec export results_dir=results/mine "
    "--archive results/published/mine.jsonl.xz",
    settings=False,
)
def export(
    overrides: Folder = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the tables, if not results_dir.")] = None,
    packed: Annotated[
        Path | None, typer.Option("--archive", help="Write the folder as one file NAME.jsonl.xz, to publish it.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the tables of a results folder again from its points, or pack the folder into one file."""
    with guard(as_json, debug):
        made = _export(configs.results_dir(overrides), out, packed)
        emit(made) if as_json else screen.show_facts(made)


def _export(folder: Path, out: Path | None, packed: Path | None) -> dict[str, Any]:
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
    archive.expect(folder, "results_dir")
    if not archive.is_folder(folder / results.RUNS):
        raise ConfigError(f"{folder} holds no {results.RUNS}/: nothing was measured there")
    if out is not None:
        preflight.check_folder(str(out), "--out")
    count, warnings = results.export(folder, out)
    warn(warnings)
    place = out or folder
    return {"points": count, "tables": [str(place / name) for name in results.TABLES if (place / name).is_file()]}
