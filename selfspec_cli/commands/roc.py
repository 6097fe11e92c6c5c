"""`selfspec roc`: which gate and threshold to use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work


@command(epilog="Examples: selfspec roc   ·   selfspec roc layer=4,8 head=lens,translator --prompts 64")
def roc(
    overrides: Overrides = None,
    longest: Annotated[int, typer.Option("--longest", min=1, help="Tokens of each draft while recording.")] = 12,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Requests recorded at each exit layer.")] = 32,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Log real drafts; say how well each gate tells which are accepted, and which gate and threshold to use."""
    with guard(as_json, debug):
        from selfspec_cli.report import make as report_stage
        from selfspec_cli.stages import roc as roc_stage

        cfgs = configs.exits(overrides or [], roc_stage.LAYER_PARTS)
        if dry_run:
            plan = roc_stage.facts(cfgs, longest, prompts)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with tracked("roc", cfgs[0]), at_work("roc", cfgs[0].results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            result = roc_stage.run(cfgs, longest=longest, prompts=prompts, **more)
        result.files |= report_stage.roc_figures(Path(result.files["table"]).parent)
        deploy = deploying.chosen("roc", result.config, result.choice()["expected_speedup"])
        if as_json:
            document = {"choice": result.choice(), "files": result.files, "deploy": deploy}
            emit({"rows": [asdict(row) for row in result.rows], **document})
        else:
            screen.show_roc(result.rows, result.choice(), result.files)
            deploying.show(deploy)
