"""`selfspec views`: compare views of the model as drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import ROWS_KEPT, emit, guard, say, warn
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.stages.views import Views


@command(
    "views",
    epilog="Examples: selfspec views model=smollm2_135m workload=chat draft_weights=fp8,int8,int4   ·   selfspec views "
    "model=smollm2_135m workload=chat draft_weights=int8 --drop 6",
)
def compare_views(
    overrides: Overrides = None,
    drop: Annotated[
        int, typer.Option("--drop", min=0, help="Most layers to look for that the draft can do without.")
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
        emit(found.document()) if as_json else _show(found)


def _show(found: Views) -> None:
    """Acceptance of each view at each position, what a draft step reads, and the speedup that its bytes allow."""
    say(
        f"{'view':<34}{'T':>5}{'tokens':>8}{'cost':>7}{'predicted':>12}   acceptance at position 1 (95 %), 2, 3 ...",
        "bold",
    )
    for row in found.rows:
        spread = f" ({row.first_low:.3f} to {row.first_high:.3f})" if row.first_low is not None else ""
        rates = [f"{rate:.3f}" for rate in row.rates]
        tokens = f"{row.mean_accepted_len:.2f}" if row.mean_accepted_len is not None else ""
        cost = f"{row.cost:.2f}" if row.cost is not None else ""
        best = f"{row.predicted:.2f}x k={row.best_k}" if row.predicted is not None else ""
        shown = f"{row.label:<34}{row.temperature:>5g}{tokens:>8}{cost:>7}{best:>12}   "
        say(shown + ", ".join([f"{rates[0]}{spread}", *rates[1:]] if rates else ["nothing was drafted"]))
        if row.identical is not None and row.identical != row.outputs:
            warn([f"{row.label}: {row.identical} of {row.outputs} outputs are those of plain decoding"])
    say("predicted: from the bytes that a step reads at batch 1; not measured")
    for name, path in found.files.items():
        say(f"{name}: {path}")
