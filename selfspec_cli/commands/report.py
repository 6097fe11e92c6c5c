"""`selfspec report`: show what was measured, on the terminal, as a page, as text, or two sets side by side."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import Output, emit, say, warn
from selfspec_cli.commands.shared import Folder, command
from selfspec_cli.record.columns import plain
from selfspec_cli.report import Format


class By(StrEnum):
    """What a report can be broken down by."""

    category = "category"


@command(
    epilog="Examples: selfspec report   ·   selfspec report results_dir=results/mine --format md   ·   "
    "selfspec report --compare results/before results/after",
    settings=False,
    dry_run=False,
)
def report(
    out: Output,
    overrides: Folder = None,
    pages: Annotated[
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
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="Only rows that meet a condition: gate=margin, speedup>1.5; repeatable."),
    ] = None,
    by: Annotated[
        By | None, typer.Option("--by", help="A table by category of prompts, in place of the report.")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Write each figure as SVG and PNG too.")] = False,
) -> None:
    """Show what was measured: tables here, and a self-contained page (HTML) with figures; or compare two sets."""
    folder = configs.results_dir(overrides)
    if compare is None and by is None and form is Format.html:
        return _page(out, folder, pages or folder, where or [], figures)
    from selfspec_cli.report import by_category, sources, static
    from selfspec_cli.report import compare as comparing

    form = Format.json if out.as_json else form
    if compare is not None:
        comparison = comparing.compare(compare, folder, where or [])
        warnings, text = comparison.warnings, comparing.text(comparison, form)
    else:
        read = sources.read(folder, where or [])
        warnings, text = read.warnings, (static if by is None else by_category).text(read, form)
    warn(warnings)
    console = Console()
    if form is Format.html and console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")


def _page(out: Output, folder: Path, pages: Path, where: Sequence[str], figures: bool) -> None:
    from selfspec_cli.commands import deploying
    from selfspec_cli.report import make, sources, table

    made, page, pictures = make.run(folder, pages, where=where, files=figures)
    warn(made.warnings)
    deploy = deploying.of_report(folder, pages)
    if out.as_json:
        files = {"page": page, "figures": pictures}
        return emit({"rows": [plain(row) for row in made.rows], **files, "warnings": made.warnings, "deploy": deploy})
    table.show(made.rows, Console(), made.targets)
    places = sources.folders(folder)
    if places != [folder]:
        say(f"{folder} holds no points of its own: these are of {len(places)} results folders below it")
    if pictures:
        say(f"figures: {len(pictures)} files in {pictures[0].parent}")
    say(f"page: {page}")
    for one in deploy:
        say(f"\n{one['what']}", "bold") if "what" in one else None
        deploying.show(one)
