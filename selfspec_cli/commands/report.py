"""`selfspec report`: show what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import guard
from selfspec_cli.commands.shared import Debug, Folder, Json, command
from selfspec_cli.report.formats import Format

Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="Only rows that meet a condition: gate=varH, speedup>1.5, status~memory; repeatable."),
]


@command(
    epilog="Examples: selfspec report   ·   selfspec report results_dir=results/mine --format md   ·   "
    "selfspec report --compare results/before results/after",
    settings=False,
)
def report(
    overrides: Folder = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the page and figures, if not results_dir.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="html writes the page; the others go to stdout.")
    ] = Format.html,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Two folders, or two of one folder's git revisions, machines or "
            "runs: what differs, and whether it is more than noise.",
        ),
    ] = None,
    where: Where = None,
    figures: Annotated[bool, typer.Option("--figures", help="Write each figure as SVG and PNG too.")] = False,
    reload: Annotated[int, typer.Option("--reload", min=0, hidden=True)] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what was measured: tables here, and a self-contained page (HTML) with figures; or compare two sets."""
    with guard(as_json, debug):
        from selfspec_cli.commands import reporting

        folder = configs.results_dir(overrides)
        if compare is not None:
            reporting.compare(folder, compare, where or [], Format.json if as_json else form)
        elif form is not Format.html:
            reporting.as_text(folder, where or [], form)
        else:
            reporting.page(folder, out or folder, where or [], figures, as_json, reload)
