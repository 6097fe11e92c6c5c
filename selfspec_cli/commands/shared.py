"""What commands share: their options, and the mark by which app.py adds them."""

import inspect
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands.help import NamesValues, TakesSettings
from selfspec_cli.commands.screen import BEGINS_AGAIN, Output, guard


def complete(incomplete: str) -> list[tuple[str, str]]:
    """How a KEY=VALUE word on the shell's line can go on. bash takes `=` for a word of its own, so that only what
    follows it is completed there. A key that is alone has its placeholder beside it in bash and zsh, which would put a
    space after the only candidate."""
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
    """Make a command for app.py of a function (out: Output, options): it gets the options of every command, and its
    errors become exit codes.

    settings: it takes draft settings as KEY=VALUE, which its help lists. dry_run: it has that option. then: what is
    true after an interrupt (screen.py), or what says so of the command's options.
    """
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
