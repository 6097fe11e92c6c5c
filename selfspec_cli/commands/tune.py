"""`selfspec tune`: find settings for a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import GOES_ON, emit, guard, warn
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work


@command(epilog="Examples: selfspec tune model=llama3_8b layer=4,8   and then: selfspec sweep tuned=llama3_8b")
def tune(
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="How many minutes the search may take.")] = 14,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Optuna trials on each engine.")] = 18,
    loads: Annotated[
        str, typer.Option("--loads", help="Numbers of running requests to find draft lengths for, such as 1,8,32,128.")
    ] = "",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Find exit layer, head, draft length, gate and threshold for a model and workload; tuned=MODEL uses them."""
    with guard(as_json, debug, GOES_ON):
        from selfspec_cli.stages import tune as tune_stage
        from selfspec_cli.stages.budget import Budget

        words, at = overrides or [], configs.numbers("--loads", loads)
        cfgs = [*configs.copies_of_all_layers(words), *configs.exits(words, tune_stage.LAYER_PARTS)]
        heads = [] if any(re.match(r"head[.=]", word) for word in words) else configs.known_heads()
        if dry_run:
            plan = tune_stage.facts(cfgs, minutes, trials, heads, at)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        warn(tune_stage.costly_copies(cfgs))
        model = [word for word in words if word.startswith(("model=", "model."))] or [f"model={cfgs[0].model.name}"]
        with tracked("tune", cfgs[0]), at_work("tune", cfgs[0].results_dir, debug) as shown:
            result = tune_stage.run(
                cfgs,
                open_engine=shown_starting(shown, forked=True),
                budget=Budget(minutes, trials),
                conf=Path("conf"),
                heads=heads,
                loads=at,
                model_words=model,
                progress=shown,
            )
        warn(result.warnings)
        document = tune_stage.document(result)
        serving = [f"tuned={document['tuned']}", *deploying.of_server(words)]
        deploy = deploying.chosen("tune", result.choice.cfg, result.choice.speedup, serving)
        if as_json:
            emit(document | {"deploy": deploy})
        else:
            screen.show_tuned(document, serving)
            deploying.show(deploy)
