"""`selfspec roc`: which gate and threshold to use."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard, say
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
            _show(result.rows, result.choice(), result.files)
            deploying.show(deploy)


def _show(rows: list[Any], choice: dict[str, Any], files: dict[str, str]) -> None:
    """Areas under the ROC curves, what each gate is expected to bring, and which one to choose."""
    say(f"{'':<6}{'head':<14}{'gate':<12}{'AUC':>6}{'at stake':>10}   best setting, and its expected speedup", "bold")
    for row in rows:
        areas = [f"{area:.3f}" if area is not None else "" for area in (row.auc, row.auc_at_stake)]
        limit = f"{row.threshold:.3g}" if row.threshold is not None else ""
        best = f"k={row.best_k:<3} {limit:<8} {row.expected_speedup:.2f}x"
        say(f"E={row.E:<4}{row.head:<14}{row.gate:<12}{areas[0]:>6}{areas[1]:>10}   {best}")
    say(
        f"use: {' '.join(choice['overrides'])}  expected {choice['expected_speedup']:.2f}x, without a gate "
        f"{choice['best_fixed_speedup']:.2f}x (k={choice['best_fixed_k']}), with an unbeatable one "
        f"{choice['oracle_speedup']:.2f}x",
        "bold",
    )
    for name, path in files.items():
        say(f"{name}: {path}")
