"""`selfspec views`: compare views of the model as drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import ROWS_KEPT, Output, say, warn
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.stages.views import Views


@command(
    "views",
    epilog="Examples: selfspec views model=smollm2_135m workload=chat draft_weights=fp8,int8,int4   ·   selfspec views "
    "model=smollm2_135m workload=chat draft_weights=int8 --drop 6",
    then=ROWS_KEPT,
)
def compare_views(
    out: Output,
    overrides: Overrides = None,
    drop: Annotated[
        int, typer.Option("--drop", min=0, help="Most layers to look for that the draft can do without.")
    ] = 0,
) -> None:
    """Compare views of the model as drafts (layers, skip_layers, draft_weights): acceptance at each position, bytes,
    predicted speedup; views share an engine."""
    from selfspec_cli.stages import views as views_stage

    cfgs = configs.several(overrides)
    preflight.check_all(cfgs)
    if out.dry_run:
        return out.plan(views_stage.facts(cfgs, drop))
    with on_engines(out, "views", cfgs[0]) as stage:
        found = views_stage.run(cfgs, drop=drop, **stage)
    out.answer(found.document(), lambda: _show(found))


def _show(found: Views) -> None:
    """Acceptance of each view at each position, what a draft step reads, and the speedup that its bytes allow."""
    lines = []
    for row in found.rows:
        spread = f" ({row.first_low:.3f} to {row.first_high:.3f})" if row.first_low is not None else ""
        rates = [f"{rate:.3f}" for rate in row.rates]
        lines.append(
            (
                row.label,
                f"{row.temperature:g}",
                f"{row.mean_accepted_len:.2f}" if row.mean_accepted_len is not None else "",
                f"{row.cost:.2f}" if row.cost is not None else "",
                f"{row.predicted:.2f}x k={row.best_k}" if row.predicted is not None else "",
                ", ".join([f"{rates[0]}{spread}", *rates[1:]] if rates else ["nothing was drafted"]),
            )
        )
        if row.identical is not None and row.identical != row.outputs:
            warn([f"{row.label}: {row.identical} of {row.outputs} outputs are those of plain decoding"])
    heads = ("view", "T", "tokens", "cost", "predicted", "acceptance at position 1 (95 %), 2, 3 ...")
    screen.table(heads, lines, text=(0, 5))
    say("predicted: from the bytes that a step reads at batch 1; not measured")
    screen.show_files(found.files)
