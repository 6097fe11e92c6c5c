"""`selfspec fit-lsq`: fit least-squares heads."""

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard, say, warn
from selfspec_cli.commands.shared import Corpus, Debug, DryRun, Json, Overrides, Pairs, Ridge, command
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.stages import preflight
from selfspec_cli.texts import corpora


class HeadFormat(StrEnum):
    """What a fitted head is written as."""

    safetensors = "safetensors"
    pt = "pt"


@command("fit-lsq", epilog="Example: selfspec fit-lsq --layer 12   and then: selfspec sweep head=lens,lsq layer=12")
def fit_lsq(
    layer: Annotated[list[int], typer.Option("--layer", help="Exit layer E, after which the head reads; repeatable.")],
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    ridge: Ridge = None,
    corpus: Corpus = "stdlib",
    form: Annotated[
        HeadFormat, typer.Option("--format", help="pt also writes ee_layer<E>_lsq.pt into head_dir (torch.save).")
    ] = HeadFormat.safetensors,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit least-squares exit heads by running the model in vLLM; head=lsq finds them in head_dir."""
    with guard(as_json, debug):
        corpora.check(corpus)
        for one_layer in layer:
            cfg = configs.one([*(overrides or []), f"layer={one_layer}", "head=lens"], None)
            preflight.check(cfg)
        preflight.check_folder(cfg.head_dir, "head_dir")
        if dry_run:
            plan = {
                "model": cfg.model.path,
                "layers": layer,
                "pairs": pairs,
                "corpus": corpus,
                "ridge": ridge,
                "folder": str(head_folder(cfg)),
            }
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        from selfspec_cli.stages import fit

        with at_work("fit-lsq", cfg.results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            fitted = fit.run(cfg, layers=layer, pairs=pairs, ridge=ridge, corpus=corpus, **more)
        made = fit.save_as_pt(cfg, fitted) if form is HeadFormat.pt else []
        warn(fitted.warnings)
        if as_json:
            return emit(asdict(fitted))
        screen.show_heads(fitted.reports, fitted.seconds)
        for file in made:
            say(f"also {file}")
