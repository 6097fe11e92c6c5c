"""`selfspec fit-weights`: copies of weights made from what the model sees."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard, say
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.working import at_work
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.stages.fit_weights import Fitted


@command("fit-weights", epilog="Example: selfspec fit-weights model=smollm2_135m workload=chat draft_weights=int4,int8")
def fit_draft_weights(
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Answers of the model to fit on.")] = 32,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; one beside the model's heads.")] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Make copies of the weights for drafting from what the model sees (GPTQ); draft_weights_path=FILE uses
    them."""
    with guard(as_json, debug):
        from selfspec_cli.stages import fit_weights

        cfgs = configs.several(overrides)
        preflight.check_all(cfgs)
        fit_weights.check(cfgs, out)
        if dry_run:
            files = [str(out or fit_weights.path_for(cfg)) for cfg in cfgs]
            plan = {"model": cfgs[0].model.path, "prompts": prompts, "files": files}
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with at_work("fit-weights", cfgs[0].results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            made = fit_weights.run(cfgs, prompts=prompts, out=out, **more)
        if as_json:
            return emit({"files": [{**asdict(one), "medians": one.medians} for one in made]})
        _show(made)


def _show(made: list[Fitted]) -> None:
    """What each file loses of a product's mean square, and how to use it."""
    for one in made:
        shares = ", ".join(f"{name} {share:.5f}" for name, share in one.medians.items())
        say(f"{one.kind}: {shares} of a product's mean square is lost (medians over the layers)")
        say(f"    draft_weights={one.kind} draft_weights_path={one.path}")
    say(f"{made[0].tokens} tokens, {made[-1].seconds:.0f} s", "bold")
