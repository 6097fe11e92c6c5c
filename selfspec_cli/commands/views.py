"""`selfspec views`: compare views of the model as drafts."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import ROWS_KEPT, emit, guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.stages import preflight


@command(
    "views",
    epilog="Examples: selfspec views model=smollm2_135m workload=chat draft_weights=fp8,int8,int4   ·   selfspec views "
    "model=smollm2_135m workload=chat draft_weights=int8 --drop 6",
)
def compare_views(
    overrides: Overrides = None,
    drop: Annotated[
        int, typer.Option("--drop", min=0, help="Look for up to so many layers that the draft can do without.")
    ] = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Compare views of the model as drafts (layers, skip_layers, draft_weights): acceptance at each position, bytes,
    predicted speedup; views share an engine."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.stages import views as views_stage

        cfgs = configs.several(overrides)
        preflight.check_all(cfgs)
        if dry_run:
            plan = views_stage.facts(cfgs, drop)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with tracked("views", cfgs[0]), at_work("views", cfgs[0].results_dir, debug) as shown:
            found = views_stage.run(cfgs, open_engine=shown_starting(shown), drop=drop, progress=shown)
        emit(found.document()) if as_json else screen.show_views(found)
