"""What commands share: options, the mark by which app.py adds them, `--help` with every draft setting (the schema),
and answers to words of the first sprint and to options of vLLM's that are not behind --."""

import inspect
import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from selfspec_cli.commands.screen import BEGINS_AGAIN, Output, guard
from selfspec_cli.config import options
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import sprint_aliases
from selfspec_cli.early_exit.errors import closest, nearest

PASS_ON = ("serve", "load")  # commands that hand what stands behind -- to vLLM's server


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


def complete(incomplete: str) -> list[tuple[str, str]]:
    """How a KEY=VALUE word on the shell's line can go on. bash completes only what follows `=`. In bash and zsh
    the only matching key comes with its placeholder as a second candidate, or the shell would add a space."""
    from selfspec_cli.config.options import candidates

    text, at = os.environ.get("COMP_WORDS", ""), int(os.environ.get("COMP_CWORD", "0"))
    try:
        line = shlex.split(text)
    except ValueError:  # a quote that is still open
        line = text.split()
    before = ""
    if "=" in line[at : at + 1] and at:
        before = f"{line[at - 1]}="
    elif at > 1 and line[at - 1] == "=":
        before = f"{line[at - 2]}="
    offered = candidates(before + incomplete)
    if len(offered) == 1 and offered[0][0].endswith("=") and "fish" not in os.environ.get("_SELFSPEC_COMPLETE", ""):
        offered.append((f"{offered[0][0]}VALUE", offered[0][1]))
    return [(text.removeprefix(before), about) for text, about in offered]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]",
        help="Hydra overrides, such as model=llama3_8b layer=8 workload.batch=1,4",
        autocompletion=complete,
    ),
]
OUTPUT = {
    "as_json": typer.Option("--json", help="End stdout with one line of JSON."),
    "dry_run": typer.Option("--dry-run", help="Show what would be done, and do nothing."),
    "debug": typer.Option("--debug", help="Show tracebacks, and all that vLLM and its libraries print."),
}
"""The options of every command, by the fields of `Output`."""
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Start from a dumped config, or from a point: results/runs/ID.json."),
]
ReuseBaseline = Annotated[
    bool,
    typer.Option(
        "--reuse-baseline",
        help="Compare with a baseline measured earlier on the same machine, versions, "
        "weights and workload, where there is one.",
    ),
]
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="(hidden state, target) pairs to fit.")]
Corpus = Annotated[
    str,
    typer.Option(
        "--corpus",
        help="stdlib, a text file, a .json, .jsonl or .parquet (ShareGPT, or FILE:COLUMN), or random.",
    ),
]
Ridge = Annotated[
    float | None, typer.Option("--ridge", help="Relative ridge, 0 for none; chosen on held-out pairs if absent.")
]
Folder = Annotated[
    list[str] | None, typer.Argument(metavar="[results_dir=FOLDER]", help="The folder that holds the results.")
]


def split_at_dashes(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Settings, and the options of vLLM's server that stand after them."""
    typed = list(words or [])
    split = next((place for place, word in enumerate(typed) if word.startswith("-")), len(typed))
    return typed[:split], typed[split:]


def command(
    name: str | None = None,
    *,
    epilog: str,
    settings: bool = True,
    dry_run: bool = True,
    then: str | Callable[[dict[str, Any]], str] = BEGINS_AGAIN,
) -> Callable[[Any], Any]:
    """Make a command for app.py of a function (out: Output, options): `OUTPUT`, and exit codes for errors. settings: it
    takes KEY=VALUE. dry_run: it has that option. then: what is true after an interrupt, or a function that says it."""
    flags = {field: option for field, option in OUTPUT.items() if dry_run or field != "dry_run"}

    def marked(function: Any) -> Any:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        def run(**words: Any) -> None:
            out = Output(**{field: words.pop(field) for field in flags})
            with guard(out.as_json, out.debug, then(words) if callable(then) else then):
                function(out, **words)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        of_all = [
            inspect.Parameter(field, kind, default=False, annotation=Annotated[bool, option])
            for field, option in flags.items()
        ]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature([*own, *of_all])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (*own, *of_all)}
        run.typer = {  # type: ignore[attr-defined]
            "name": name,
            "epilog": epilog,
            "cls": TakesSettings if settings else NamesValues,
        }
        return run

    return marked
