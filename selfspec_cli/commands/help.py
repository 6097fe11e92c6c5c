"""Commands that take overrides: their `--help` (what Typer says, and every draft setting, from the schema), and the
answers to words of the first sprint and to options of vLLM's that are not behind --."""

import itertools
import shlex
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from selfspec_cli.commands.screen import guard
from selfspec_cli.config import options
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import sprint_aliases
from selfspec_cli.early_exit.errors import closest, nearest

PASS_ON = ("serve", "load")
"""Commands that hand what stands behind -- to vLLM's server."""


MEANT = {
    "selfspec": {
        "compare": "report --compare",
        "export": "runs export",
        "gate": "check",
        "heads": "fit",
        "list": "runs list",
        "views": "sweep",
    },
    "runs": {"ls": "list", "rm": "delete"},
}
"""Of a group of commands: words that people type -> the commands that they mean."""


class NamesCommands(TyperGroup):
    """A group of commands that answers a word that is none of them with the line to type."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer does, with a ConfigError's exit code and form for an unknown command."""
        word = args[0] if args else ""
        if args and not word.startswith("-") and self.get_command(ctx, word) is None:
            with guard("--json" in args, "--debug" in args):
                raise ConfigError(self._answer(ctx, word, args))
        return super().resolve_command(ctx, args)

    def _answer(self, ctx: Any, word: str, args: Sequence[str]) -> str:
        """What is said of `word`, the first of `args`, which is no command."""
        meant = MEANT.get(str(self.name), {})
        if word in meant:
            line = shlex.join([*ctx.command_path.split(), *meant[word].split(), *args[1:]])
            return f"command {word!r} is not known; type: {line}"
        if self.name == "runs" and any(sign in word for sign in "=<>~"):  # a setting or a condition
            return f"{word} is no command of selfspec runs; type: {shlex.join(['selfspec', 'runs', 'list', *args])}"
        if word == "pull":  # spelt almost like ppl
            return "selfspec pull is gone: vLLM downloads a model by itself, and so does hf download MODEL"
        return closest(word, self.list_commands(ctx), "command")


class NamesValues(TyperCommand):
    """A command that names the value of an option which it refuses, where Typer names the option alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer does, with the value in front of what is wrong with it."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            value = _value_of(error.param.opts if error.param is not None else [], typed)
            if value and value not in error.message:
                error.message = f"{value}: {error.message}"
            raise


def _value_of(option: Sequence[str], typed: Sequence[str]) -> str | None:
    """What was typed for an option, by any of its names."""
    for word, following in itertools.zip_longest(typed, typed[1:]):
        name, separator, value = word.partition("=")
        if name in option:
            return value if separator else following
    return None


class TakesSettings(NamesValues):
    """A command whose arguments are KEY=VALUE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer words of the first sprint and options of vLLM's, exit code 2, before Typer calls them unknown."""
        name = str(ctx.info_name)
        with guard("--json" in args, "--debug" in args):
            answer = sprint_aliases.answer_for_arguments(name, args)
            if answer is None and name in PASS_ON:
                answer = self._answer_for_options(name, args)
            if answer is not None:
                raise ConfigError(answer)
        return super().parse_args(ctx, args)

    def _answer_for_options(self, name: str, args: list[str]) -> str | None:
        own = [option for param in self.params for option in param.opts if option.startswith("--")]
        before = args[: args.index("--")] if "--" in args else args
        typed = [word.partition("=")[0] for word in before if word.startswith("--")]
        strange = next((word for word in typed if word not in (*own, "--help")), None)
        if strange is None:
            return None
        meant = nearest(strange[2:], [option[2:] for option in own])
        own_one = f"; did you mean '--{meant}'?" if meant else "."
        return (
            f"option {strange!r} is not known; allowed: {', '.join(own)}{own_one} Options of vLLM's server stand "
            f"behind --, such as: selfspec {name} ... -- {strange} ..."
        )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; Typer prints its part by itself too."""
        super().format_help(ctx, formatter)
        table = Table.grid(padding=(0, 2))
        for row in options.draft_rows():
            table.add_row(Text(row.key, style="bold cyan"), Text(row.help))
        note = Text(
            "Text needs no quotes; a comma inside a value is written \\, . Settings of model, workload and "
            "engine, ranges, defaults and choices: selfspec options",
            style="dim",
        )
        table.add_row("", note)
        Console().print(Panel(table, title="Draft settings", title_align="left", border_style="dim"))
