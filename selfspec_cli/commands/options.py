"""`selfspec options`: every setting."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from selfspec_cli.commands.screen import Output, emit, say
from selfspec_cli.commands.shared import command
from selfspec_cli.config import options
from selfspec_cli.config.options import Choice, Row
from selfspec_cli.config.schema import ConfigError


@command(
    "options",
    epilog="Examples: selfspec options   ·   selfspec options gate   ·   selfspec options --json",
    settings=False,
    dry_run=False,
)
def show_options(
    out: Output,
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Show only what holds this word in its name or description.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Show the settings that are rarely needed, too.")] = False,
) -> None:
    """Settings: key, type, unit, range, default and meaning; every gate, head and kind of draft weights."""
    rows, choices = options.rows(word, rare=every or out.as_json), options.choices(word)
    if not rows and not choices:
        raise ConfigError(options.unknown(word))
    if out.as_json:
        return emit({"options": [asdict(row) for row in rows], "choices": [asdict(one) for one in choices]})
    _show(rows, choices)
    if not (word or every):
        say(f"{len(options.RARE)} more are rarely needed: selfspec options --all", "dim")


def _show(rows: list[Row], choices: list[Choice]) -> None:
    for row in rows:
        about = ", ".join(part for part in (row.unit or row.type, row.allowed) if part)
        spec = f"; in a speculative_config: {row.spec_key}" if row.spec_key else ""
        head = Text.assemble((row.key, "bold"), f" = {row.default}", (f"  ({about}{spec})", "dim"))
        Console(soft_wrap=True).print(head)
        say(f"    {row.help}")
    for one in choices:
        default = f"  (threshold: {one.default} if none is given)" if one.default else ""
        Console(soft_wrap=True).print(Text.assemble((f"{one.key}={one.name}", "bold"), (default, "dim")))
        say(f"    {one.help}")
