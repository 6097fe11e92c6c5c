"""`selfspec tune`: find settings for a model."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import GOES_ON, Output, emit, say, warn
from selfspec_cli.commands.shared import Overrides, command


@command(epilog="Examples: selfspec tune model=llama3_8b   and then: selfspec sweep tuned=llama3_8b", then=GOES_ON)
def tune(
    out: Output,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="After how many minutes nothing new begins.")] = 14,
) -> None:
    """Find exit layer, head, draft length, gate and threshold for a model and workload; tuned=MODEL uses them."""
    from selfspec_cli.stages import tune as tune_stage

    words = overrides or []
    cfgs = [*configs.copies_of_all_layers(words), *configs.exits(words, tune_stage.LAYER_PARTS)]
    heads = [] if any(re.match(r"head[.=]", word) for word in words) else configs.known_heads()
    if out.dry_run:
        return out.plan(tune_stage.facts(cfgs, minutes, heads))
    model = [word for word in words if word.startswith(("model=", "model."))] or [f"model={cfgs[0].model.name}"]
    with on_engines(out, "tune", cfgs[0], forked=True) as stage:
        budget = tune_stage.Budget(minutes)
        choice, document = tune_stage.run(
            cfgs, budget=budget, conf=Path("conf"), heads=heads, model_words=model, **stage
        )
    warn(document["warnings"])
    serving = [f"tuned={document['tuned']}", *(word for word in words if word.startswith(deploying.OF_A_SERVER))]
    deploy = deploying.chosen("tune", choice, document["speedup"], serving)
    if out.as_json:
        return emit(document | {"deploy": deploy})
    _show(document, serving)
    deploying.show(deploy)


def _show(document: dict[str, Any], words: Sequence[str]) -> None:
    """What tuning measured last, what it chose, and how to use it. words: that name the choice."""
    for found in sorted(document["finalists"], key=lambda found: -found["speedup"]):
        limit = f"{found['threshold']:.3g}" if found["threshold"] is not None else ""
        pair = (found["speedup_low"], found["speedup_high"])
        spread = f"{found['speedup']:.2f}x" + (f" ({pair[0]:.2f} to {pair[1]:.2f})" if None not in pair else "")
        pace = f"plain decoding {found['plain_tok_s']:.0f} tok/s"
        say(f"E={found['E']} {found['head']} k={found['k']:<3} {found['gate']:<9} {limit:<7} {spread}, {pace}")
    say(
        f"{' '.join(document['overrides'])}: {document['speedup']:.2f}x plain decoding, the greatest of "
        f"{len(document['finalists'])} finalists, so measure it anew; found in {document['seconds']:.0f} s",
        "bold",
    )
    say(f"written to {document['file']}; use it with: {shlex.join(['selfspec', 'sweep', *words])}")
