"""What commands share: their options, and the mark by which app.py adds them."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands.help import NamesValues, TakesSettings


def complete(incomplete: str) -> list[tuple[str, str]]:
    """How a KEY=VALUE word on the shell's line can go on.

    bash takes `=` for a word of its own, so that only what follows it is completed there. A key that is alone has its
    placeholder beside it in bash and zsh, which would put a space after the only candidate.
    """
    from selfspec_cli.config.completion import candidates

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
    found = candidates(before + incomplete)
    if len(found) == 1 and found[0][0].endswith("=") and "fish" not in os.environ.get("_SELFSPEC_COMPLETE", ""):
        found.append((f"{found[0][0]}VALUE", found[0][1]))
    return [(text.removeprefix(before), about) for text, about in found]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]",
        help="Hydra overrides, such as model=llama3_8b layer=8 workload.batch=1,4",
        autocompletion=complete,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="End stdout with one line of JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run; start no engine.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and all that vLLM and its libraries print.")]
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
        help="stdlib, a text file, a .json, .jsonl or .parquet (ShareGPT, or FILE:COLUMN), "
        "hf:NAME\\[@CONFIG][:SPLIT[:COLUMN]] such as hf:org/set@en:train[:1%]:text, or random.",
    ),
]
Ridge = Annotated[
    float | None, typer.Option("--ridge", help="Relative ridge, 0 for none; chosen on held-out pairs if absent.")
]
Folder = Annotated[
    list[str] | None, typer.Argument(metavar="[results_dir=FOLDER]", help="The folder that holds the results.")
]


def command(name: str | None = None, *, epilog: str, settings: bool = True) -> Callable[[Any], Any]:
    """Mark a function as a command for app.py. settings: it takes draft settings as KEY=VALUE, which its help lists."""

    def marked(function: Any) -> Any:
        function.typer = {"name": name, "epilog": epilog, "cls": TakesSettings if settings else NamesValues}
        return function

    return marked
