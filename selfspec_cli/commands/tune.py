"""`selfspec roc` and `selfspec tune`: which gate and threshold to use, and all settings for a model."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import GOES_ON, Output, emit, say, warn
from selfspec_cli.commands.shared import Overrides, command


@command(epilog="Examples: selfspec roc   ·   selfspec roc layer=4,8 head=lens,translator --prompts 64")
def roc(
    out: Output,
    overrides: Overrides = None,
    longest: Annotated[int, typer.Option("--longest", min=1, help="Tokens of each draft while recording.")] = 12,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Requests recorded at each exit layer.")] = 32,
) -> None:
    """Log real drafts; say how well each gate tells which are accepted, and which gate and threshold to use."""
    from selfspec_cli.report import make as report_stage
    from selfspec_cli.stages import roc as roc_stage

    cfgs = configs.exits(overrides or [], roc_stage.LAYER_PARTS)
    if out.dry_run:
        return out.plan(roc_stage.facts(cfgs, longest, prompts))
    with on_engines(out, "roc", cfgs[0]) as stage:
        result = roc_stage.run(cfgs, longest=longest, prompts=prompts, **stage)
    result.files |= report_stage.roc_figures(Path(result.files["table"]).parent)
    choice = result.choice()
    deploy = deploying.chosen("roc", result.config, choice["expected_speedup"])
    if out.as_json:
        rows = [asdict(row) for row in result.rows]
        return emit({"rows": rows, "choice": choice, "files": result.files, "deploy": deploy})
    _show_gates(result.rows, choice)
    screen.show_files(result.files)
    deploying.show(deploy)


def _show_gates(rows: list[Any], choice: dict[str, Any]) -> None:
    screen.table(
        ("layer", "head", "gate", "AUC", "at stake", "best setting", "expected"),
        [
            (
                f"E={row.E}",
                row.head,
                row.gate,
                *("" if area is None else f"{area:.3f}" for area in (row.auc, row.auc_at_stake)),
                f"k={row.best_k}" + ("" if row.threshold is None else f" {row.threshold:.3g}"),
                f"{row.expected_speedup:.2f}x",
            )
            for row in rows
        ],
        text=(0, 1, 2, 5),
    )
    say(
        f"use: {' '.join(choice['overrides'])}  expected {choice['expected_speedup']:.2f}x, without a gate "
        f"{choice['best_fixed_speedup']:.2f}x (k={choice['best_fixed_k']}), with an unbeatable one "
        f"{choice['oracle_speedup']:.2f}x",
        "bold",
    )


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
