"""`selfspec export`: tables and archives of a results folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.screen import emit, guard
from selfspec_cli.commands.shared import Debug, Folder, Json, command


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
        from selfspec_cli.commands import reporting

        made = reporting.export(configs.results_dir(overrides), out, packed)
        emit(made) if as_json else screen.show_facts(made)
