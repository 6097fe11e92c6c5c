"""`selfspec fit-weights`: copies of weights made from what the model sees."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import Output, say
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.stages.fit_weights import Fitted


@command("fit-weights", epilog="Example: selfspec fit-weights model=smollm2_135m workload=chat draft_weights=int4,int8")
def fit_draft_weights(
    out: Output,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Answers of the model to fit on.")] = 32,
    file: Annotated[
        Path | None, typer.Option("--out", help="File to write; by default one in the folder of the model's heads.")
    ] = None,
) -> None:
    """Make copies of the weights for drafting from what the model sees (GPTQ); draft_weights_path=FILE uses
    them."""
    from selfspec_cli.stages import fit_weights

    cfgs = configs.several(overrides)
    preflight.check_all(cfgs)
    fit_weights.check(cfgs, file)
    if out.dry_run:
        files = [str(file or fit_weights.path_for(cfg)) for cfg in cfgs]
        return out.plan({"model": cfgs[0].model.path, "prompts": prompts, "files": files})
    with on_engines(out, "fit-weights", cfgs[0], is_tracked=False) as stage:
        fitted = fit_weights.run(cfgs, prompts=prompts, out=file, **stage)
    out.answer({"files": [{**asdict(one), "medians": one.medians} for one in fitted]}, lambda: _show(fitted))


def _show(fitted: list[Fitted]) -> None:
    """What each file loses of a product's mean square, and how to use it."""
    for one in fitted:
        shares = ", ".join(f"{name} {share:.5f}" for name, share in one.medians.items())
        say(f"{one.kind}: {shares} of a product's mean square is lost (medians over the layers)")
        say(f"    draft_weights={one.kind} draft_weights_path={one.path}")
    say(f"{fitted[0].tokens} tokens, {fitted[-1].seconds:.0f} s", "bold")
