"""Commands that take overrides: their `--help` (what Typer says, and every draft setting, from the schema), and the
answer to words of the first sprint."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from selfspec_cli.commands.screen import guard
from selfspec_cli.config import options
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import old_words


class TakesSettings(TyperCommand):
    """A command whose arguments are KEY=VALUE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer words of the first sprint, exit code 2, before Typer calls them unknown."""
        with guard("--json" in args, "--debug" in args):
            answer = old_words.answer_for_arguments(str(ctx.info_name), args)
            if answer is not None:
                raise ConfigError(answer)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; Typer prints its part by itself too."""
        super().format_help(ctx, formatter)
        table = Table.grid(padding=(0, 2))
        for row in options.draft_rows():
            table.add_row(Text(row.key, style="bold cyan"), Text(row.help))
        note = Text("Text needs no quotes; a comma inside a value is written \\, . Settings of model, workload and "
                    "engine, ranges, defaults and choices: selfspec options", style="dim")  # fmt: skip
        table.add_row("", note)
        Console().print(Panel(table, title="Draft settings", title_align="left", border_style="dim"))
