"""`selfspec gate`: is the speed still what a file asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec_cli.commands.screen import ROWS_KEPT, guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command


@command(
    epilog="Examples: selfspec gate experiments/gates/cpu_micro.yaml   ·   selfspec gate experiments/gates/h100_8b.yaml"
    " results_dir=results/h100 --junit gates.xml",
    settings=False,
)
def gate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One of experiments/gates/; docs/verify.md.")],
    overrides: Overrides = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML, too.")] = None,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a fault that costs speed: the verdict must be red.")
    ] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Performance gate: is the speed still what FILE asks for? (The gate of a draft is the setting gate=.) Exit code 0:
    green; 1: red, or not measurable, which the last line says; 2: bad input, or its micro gate was not green yet."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.commands import gating

        gating.gate(file, overrides or [], plant=plant, junit=junit, as_json=as_json, dry_run=dry_run, debug=debug)
