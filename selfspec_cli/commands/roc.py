"""`selfspec roc`: which gate and threshold to use."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import Output, emit, say
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
    _show(result.rows, choice)
    screen.show_files(result.files)
    deploying.show(deploy)


def _show(rows: list[Any], choice: dict[str, Any]) -> None:
    """Areas under the ROC curves, what each gate is expected to bring, and which one to choose."""
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
