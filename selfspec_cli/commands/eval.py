"""`selfspec eval`: scores of lm-evaluation-harness."""

from typing import Annotated

import typer

from selfspec_cli.commands import configs, findings
from selfspec_cli.commands.screen import FINDINGS_KEPT, Output
from selfspec_cli.commands.shared import Overrides, command


@command(
    "eval",
    epilog="Examples: selfspec eval gate=margin tau=0.2   ·   selfspec eval --tasks arc_easy,hellaswag --limit 200",
    then=FINDINGS_KEPT,
)
def evaluate(
    out: Output,
    overrides: Overrides = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Names of lm-evaluation-harness, or stdlib_choice and stdlib_line.")
    ] = "stdlib_choice,stdlib_line",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples of each task.")] = 100,
    fewshot: Annotated[int, typer.Option("--num-fewshot", min=0, help="Solved examples before each question.")] = 0,
) -> None:
    """Scores of lm-evaluation-harness over the live engine, of the baseline and of every arm, with standard errors."""
    findings.evaluate(configs.several(overrides), tasks.split(","), limit, fewshot, out)
