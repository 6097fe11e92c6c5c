"""What commands share: their options, and the mark by which app.py adds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands.help import NamesValues, TakesSettings

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Hydra overrides, such as model=llama3_8b layer=8 workload.batch=1,4"),
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
    typer.Option("--reuse-baseline", help="Compare with a baseline measured earlier on the same machine, versions, "
                 "weights and workload, where there is one."),
]  # fmt: skip
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
