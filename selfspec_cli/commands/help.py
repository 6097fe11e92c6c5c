"""The `--help` of commands that take overrides: what Typer says, and every draft setting, from the schema."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from selfspec_cli.config import options


class TakesSettings(TyperCommand):
    """A command whose arguments are KEY=VALUE."""

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
