"""`selfspec fit`: fit heads of every kind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard, warn
from selfspec_cli.commands.shared import Corpus, Debug, DryRun, Json, Overrides, Pairs, Ridge, command
from selfspec_cli.commands.working import at_work
from selfspec_cli.stages import head_plan, preflight
from selfspec_cli.texts import corpora


@command("fit", epilog="Example: selfspec fit head=lsq,lsq_argmax,translator_r15 layer=4,8,12 vocab=full,4096")
def fit_heads(
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    ridge: Ridge = None,
    corpus: Corpus = "stdlib",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit exit heads of every kind at several layers in one pass, over all tokens and over draft vocabularies."""
    with guard(as_json, debug):
        plan = head_plan.to_fit(configs.several(overrides))
        preflight.check_folder(plan.cfg.head_dir, "head_dir")
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.stages import fit

        with at_work("fit", plan.cfg.results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            fitted = fit.run(plan.cfg, **plan.request(), pairs=pairs, ridge=ridge, corpus=corpus, **more)
        warn(fitted.warnings)
        emit(asdict(fitted)) if as_json else screen.show_heads(fitted.reports, fitted.seconds)
