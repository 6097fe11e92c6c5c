"""`selfspec eval`: scores of lm-evaluation-harness."""

from typing import Annotated

import typer

from selfspec_cli.commands import configs, findings
from selfspec_cli.commands.screen import FINDINGS_KEPT, guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command


@command(
    "eval",
    epilog="Examples: selfspec eval gate=margin tau=0.2   ·   selfspec eval --tasks arc_easy,hellaswag --limit 200",
)
def evaluate(
    overrides: Overrides = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Names of lm-evaluation-harness, or stdlib_choice and stdlib_line.")
    ] = "stdlib_choice,stdlib_line",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples of each task.")] = 100,
    fewshot: Annotated[int, typer.Option("--num-fewshot", min=0, help="Solved examples before each question.")] = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Scores of lm-evaluation-harness over the live engine, of the baseline and of every arm, with standard errors."""
    with guard(as_json, debug, FINDINGS_KEPT):
        runs, names = configs.several(overrides), tasks.split(",")
        findings.evaluate(runs, names, limit, fewshot, as_json=as_json, dry_run=dry_run, debug=debug)
