"""`selfspec heads`: compare heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import ROWS_KEPT, emit, guard
from selfspec_cli.commands.shared import Corpus, Debug, DryRun, Json, Overrides, Pairs, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.stages import head_plan, preflight
from selfspec_cli.texts import corpora


@command("heads", epilog="Example: selfspec heads layer=2,4,8,12 vocab=full,1024")
def compare_heads(
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    top: Annotated[int, typer.Option("--top", min=0, help="Measure this many of the best in the engine.")] = 5,
    corpus: Corpus = "stdlib",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit and compare heads at every layer asked for: agreement, accepted length, bytes, predicted speedup; measure the
    best ones."""
    with guard(as_json, debug, ROWS_KEPT):
        plan = head_plan.to_compare(overrides or [], configs.several)
        preflight.check_folder(plan.cfg.head_dir, "head_dir")
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.report import heads as heads_figure
        from selfspec_cli.stages import heads as compare

        with tracked("heads", plan.cfg), at_work("heads", plan.cfg.results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            found = compare.run(plan, pairs=pairs, top=top, corpus=corpus, **more)
        figure = heads_figure.draw(found.rows, Path(plan.cfg.results_dir) / "heads.png")
        found.files |= {"figure": figure} if figure else {}
        best = plan.to_deploy(found.rows)
        deploy = {} if best is None else deploying.chosen("heads", *best)
        if as_json:
            emit(found.document() | ({"deploy": deploy} if deploy else {}))
        else:
            screen.show_comparison(found)
            deploying.show(deploy) if deploy else None
        raise typer.Exit(found.exit_code)
