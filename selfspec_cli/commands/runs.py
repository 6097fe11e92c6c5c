"""`selfspec report`: show what was measured, on the terminal, as a page, as text, or two sets side by side; `selfspec
runs`: list, filter, show, delete and export the points of a results folder."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import Output, emit, say, show_facts, table, warn
from selfspec_cli.commands.shared import Folder, NamesCommands, command
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, columns, tables
from selfspec_cli.record import folder as results
from selfspec_cli.record.columns import Record, plain
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import group_title, label, times
from selfspec_cli.report.table import Format
from selfspec_cli.stages import preflight


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
    from selfspec_cli.report import compare as comparing
    from selfspec_cli.report import sources, table

    form = Format.json if out.as_json else form
    if compare is not None:
        comparison = comparing.compare(compare, folder, where or [])
        warnings, text = comparison.warnings, comparing.text(comparison, form)
    else:
        read = sources.read(folder, where or [])
        warnings, text = read.warnings, (table.text if by is None else table.by_category)(read, form)
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


app = typer.Typer(
    cls=NamesCommands, no_args_is_help=True, help="List, filter, show, delete and export measured points."
)

RESULTS = "results_dir"
OF_FOLDER: dict[str, Any] = {"settings": False, "dry_run": False}  # of a command that reads a folder
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONDITION]",
        help="Such as gate=margin, speedup>1.5, status~memory, time>=2026-11-21; and results_dir=FOLDER.",
    ),
]
Ids = Annotated[
    list[str],
    typer.Argument(metavar="ID", help="A point's id, or as much of it as is unique; and results_dir=FOLDER."),
]


@command("list", epilog="Example: selfspec runs list gate=margin 'speedup>1.5' results_dir=results/mine", **OF_FOLDER)
def list_points(out: Output, words: Words = None) -> None:
    """The points of a folder, or those that meet every condition."""
    folder, conditions = _place(words or [])
    rows = columns.chosen([tables.row(point) for point in _points(folder)], conditions)
    if out.as_json:
        return emit({"points": [plain(row) for row in rows]})
    lines = [
        (
            row.point,
            row.time[:19],
            label(row),
            group_title(row),
            f"{row.tok_s_median:,.1f}" if row.tok_s_median is not None else "",
            times(row),
            row.status[:80],
        )
        for row in rows
    ]
    heads = ("id", "time", "arm", "workload", "tok/s", "speedup", "status")
    table(heads, lines, text=(0, 1, 2, 3, 6), styles=["" if row.status == "ok" else "red" for row in rows])
    say(f"{len(rows)} point(s) in {folder}")


@command("show", epilog="Example: selfspec runs show c57c5a1cce06", **OF_FOLDER)
def show(out: Output, ids: Ids) -> None:
    """Everything that is known of points: row, command, configuration, provenance, times of repeats."""
    folder, names = _place(ids)
    chosen = [_one(_points(folder), name) for name in names]
    if out.as_json:
        return emit({"points": [_document(point) for point in chosen]})
    for point in chosen:
        row = tables.row(point)
        say(f"{label(row)}, {group_title(row)}", "bold")
        say(f"file: {folder / results.RUNS / point.id}.json")
        say(f"command: {' '.join(point.command or []) or 'not kept'}")
        print(json.dumps(_document(point), indent=1, ensure_ascii=False, default=str))


@command(
    "delete",
    epilog="Examples: selfspec runs delete 826f5a288485   ·   selfspec runs delete status~memory --yes",
    settings=False,
)
def delete(
    out: Output,
    words: Annotated[
        list[str], typer.Argument(metavar="ID|CONDITION", help="Points by id, or all that meet every condition.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete points for good, and make the tables again. Points that were compared with them keep their figures."""
    folder, rest = _place(words)
    if not rest:
        raise ConfigError("nothing was named; name points by id, or conditions such as status~memory")
    rows = _meant(_points(folder), rest)
    names = [row.point for row in rows]
    if not out.dry_run and names and not yes:
        _ask(rows, out.as_json)
    if names and not out.dry_run:
        results.delete(folder, names)
    if out.as_json:
        return emit({"dry_run": out.dry_run, "deleted": names})
    for row in rows:
        say(f"{row.point}  {label(row)}  {row.status}")
    say(f"{len(names)} point(s) {'would be' if out.dry_run else 'were'} deleted from {folder}")


@command(
    "export",
    epilog="Examples: selfspec runs export results_dir=results/mine   ·   selfspec runs export "
    "results_dir=results/mine --archive results/published/mine.jsonl.xz",
    **OF_FOLDER,
)
def export(
    out: Output,
    overrides: Folder = None,
    place: Annotated[Path | None, typer.Option("--out", help="Folder for the tables, if not results_dir.")] = None,
    packed: Annotated[
        Path | None, typer.Option("--archive", help="Write the folder as one file NAME.jsonl.xz, to publish it.")
    ] = None,
) -> None:
    """Make the tables of a results folder again from its points, or pack the folder into one file."""
    folder = configs.results_dir(overrides)
    facts: dict[str, Any]
    if packed is not None:
        if place is not None:
            raise ConfigError("--archive writes one file, and --out tables; ask for one of them")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name the one to pack: results_dir=FOLDER")
        facts = {"files": archive.pack(folder, packed), "archive": packed}
    else:
        _expect_points(folder)
        if place is not None:
            preflight.check_folder(str(place), "--out")
        count, warnings = results.export(folder, place)
        warn(warnings)
        made = [(place or folder) / name for name in results.TABLES]
        facts = {"points": count, "tables": [str(file) for file in made if file.is_file()]}
    out.answer(facts, lambda: show_facts(facts))


for one in (list_points, show, delete, export):
    app.command(**one.typer)(one)


def _ask(rows: list[Record], as_json: bool) -> None:
    """Raises ConfigError where nobody can answer, and typer.Exit where the answer is no."""
    if as_json or not sys.stdin.isatty():
        raise ConfigError(f"{len(rows)} point(s) would be deleted for good; give --yes to do it, or --dry-run to look")
    for row in rows[:20]:
        say(f"{row.point}  {label(row)}  {row.status}")
    if not typer.confirm(f"Delete {len(rows)} point(s) for good?"):
        raise typer.Exit(0)


def _place(words: list[str]) -> tuple[Path, list[str]]:
    named = [word for word in words if word.startswith(f"{RESULTS}=")]
    folder = configs.results_dir(named)
    _expect_points(folder)
    return folder, [word for word in words if word not in named]


def _expect_points(folder: Path) -> None:
    archive.expect(folder, RESULTS)
    if not archive.is_folder(folder / results.RUNS):
        raise ConfigError(
            f"{folder} holds no {results.RUNS}/: nothing was measured there; measure with selfspec sweep, or name "
            f"another folder: {RESULTS}=FOLDER"
        )


def _points(folder: Path) -> list[Point]:
    points, warnings = results.read(folder)
    warn(warnings)
    return points


def _one(points: list[Point], name: str) -> Point:
    """The point whose id begins so, the newest of several of one key; raises ConfigError for none or several keys."""
    matching = [point for point in points if point.id.startswith(name)]
    if not matching:
        raise ConfigError(f"no point's id begins with {name!r}; selfspec runs list shows them")
    if len({point.key for point in matching}) > 1:
        raise ConfigError(f"{name!r} is not unique: {', '.join(point.id for point in matching[:5])}")
    return matching[-1]


def _meant(points: list[Point], words: list[str]) -> list[Record]:
    """Rows by id (every point of which the id begins so), or by conditions."""
    rows = [tables.row(point) for point in points]
    if any(sign in word for word in words for sign in "=<>~"):
        return columns.chosen(rows, words)
    for word in words:
        _one(points, word)  # raises where nothing, or more than one key, is meant
    return [row for row in rows if any(row.point.startswith(word) for word in words)]


def _document(point: Point) -> dict[str, Any]:
    names = ("command", "config", "digests", "versions", "hardware", "git", "engine")
    return {
        "row": plain(tables.row(point)),
        **{name: getattr(point, name) for name in names},
        "compared_with": point.compared_with and asdict(point.compared_with),
        "repeats": [{"seconds": repeat.seconds, "tok_s": repeat.tok_s} for repeat in point.repeats],
    }
