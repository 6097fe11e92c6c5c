"""`selfspec fit`: fit heads of every kind, and compare them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import ROWS_KEPT, emit, guard, say, warn
from selfspec_cli.commands.shared import Corpus, Debug, DryRun, Json, Overrides, Pairs, Ridge, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.stages import head_plan, preflight
from selfspec_cli.texts import corpora

if TYPE_CHECKING:
    from selfspec_cli.stages.head_plan import HeadPlan
    from selfspec_cli.stages.heads import Comparison


@command(
    "fit",
    epilog="Examples: selfspec fit head=lsq,lsq_argmax,translator_r15 layer=4,8,12 vocab=full,4096   ·   selfspec fit "
    "--compare layer=2,4,8,12 vocab=full,1024",
)
def fit_heads(
    overrides: Overrides = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Fit every head that is not named, predict speedups, measure the best.")
    ] = False,
    pairs: Pairs = 50_000,
    ridge: Ridge = None,
    top: Annotated[int, typer.Option("--top", min=0, help="With --compare: how many to measure in the engine.")] = 5,
    corpus: Corpus = "stdlib",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit exit heads of every kind at several layers in one pass, over all tokens and over draft vocabularies. With
    --compare say which pays: agreement, accepted length, bytes, predicted speedup; and measure the best ones."""
    with guard(as_json, debug, *([ROWS_KEPT] if compare else [])):
        if compare and ridge is not None:
            raise ConfigError("--ridge with --compare: heads that are compared have theirs chosen; leave it out")
        words = overrides or []
        plan = head_plan.to_compare(words, configs.several) if compare else head_plan.to_fit(configs.several(words))
        preflight.check_folder(plan.cfg.head_dir, "head_dir")
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        if compare:
            raise typer.Exit(_compare(plan, pairs, top, corpus, as_json, debug))
        from selfspec_cli.stages import fit

        with at_work("fit", plan.cfg.results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            fitted = fit.run(plan.cfg, **plan.request(), pairs=pairs, ridge=ridge, corpus=corpus, **more)
        warn(fitted.warnings)
        emit(asdict(fitted)) if as_json else screen.show_heads(fitted.reports, fitted.seconds)


def _compare(plan: HeadPlan, pairs: int, top: int, corpus: str, as_json: bool, debug: bool) -> int:
    """Fit, predict and measure; show what was found. Returns the exit code."""
    from selfspec_cli.report import heads as heads_figure
    from selfspec_cli.stages import heads

    with tracked("heads", plan.cfg), at_work("heads", plan.cfg.results_dir, debug) as shown:
        more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
        comparison = heads.run(plan, pairs=pairs, top=top, corpus=corpus, **more)
    figure = heads_figure.draw(comparison.rows, Path(plan.cfg.results_dir) / "heads.png")
    comparison.files |= {"figure": figure} if figure else {}
    best = plan.to_deploy(comparison.rows)
    deploy = {} if best is None else deploying.chosen("fit", *best)
    if as_json:
        emit(comparison.document() | ({"deploy": deploy} if deploy else {}))
    else:
        _show_comparison(comparison)
        deploying.show(deploy) if deploy else None
    return comparison.exit_code


def _show_comparison(found: Comparison) -> None:
    """The table of heads, the best of them, and what could not be measured."""
    from selfspec_cli.report import heads

    Console(width=None if Console().is_terminal else 136).print(heads.table(found.rows))
    if found.best is not None:
        best = found.best
        say(f"best: {best.label} k={best.best_k}, predicted {best.predicted_speedup:.2f}x", "bold")
    for name, path in found.files.items():
        say(f"{name:<7} {path}")
    warn(found.failed)
