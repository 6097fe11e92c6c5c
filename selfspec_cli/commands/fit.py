"""`selfspec fit`, `fit-lsq`, `fit-weights`: heads and copies; `roc`: gate and threshold; `tune`: all settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_cli.commands import configs, deploying, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import GOES_ON, Output, emit, say, warn
from selfspec_cli.commands.shared import Corpus, Overrides, Pairs, Ridge, command
from selfspec_cli.config.model_files import head_folder
from selfspec_cli.config.schema import ConfigError, RunConfig, head_spec
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.stages import preflight
from selfspec_cli.texts import corpora

if TYPE_CHECKING:
    from selfspec_cli.stages.fit import FitResult, Fitted


class HeadFormat(StrEnum):
    """What a fitted head is written as."""

    safetensors = "safetensors"
    pt = "pt"


@command("fit-lsq", epilog="Example: selfspec fit-lsq --layer 12   and then: selfspec sweep head=lens,lsq layer=12")
def fit_lsq(
    out: Output,
    layer: Annotated[list[int], typer.Option("--layer", help="Exit layer E, after which the head reads; repeatable.")],
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    ridge: Ridge = None,
    corpus: Corpus = "stdlib",
    form: Annotated[
        HeadFormat, typer.Option("--format", help="pt also writes ee_layer<E>_lsq.pt into head_dir (torch.save).")
    ] = HeadFormat.safetensors,
) -> None:
    """Fit least-squares exit heads by running the model in vLLM; head=lsq finds them in head_dir."""
    words = [*(overrides or []), f"layer={','.join(map(str, layer))}", "head=lsq"]
    cfg, request = to_fit(configs.several(words))
    fitted = _fit(out, "fit-lsq", cfg, request, pairs, ridge, corpus)
    if fitted is None:
        return
    from selfspec_cli.stages import fit

    files = fit.save_as_pt(cfg, fitted) if form is HeadFormat.pt else []
    _show_fitted(out, fitted)
    for file in [] if out.as_json else files:
        say(f"also {file}")


@command(
    "fit",
    epilog="Example: selfspec fit head=lsq,lsq_argmax,translator_r15 layer=4,8,12 vocab=full,4096",
)
def fit_heads(
    out: Output,
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    ridge: Ridge = None,
    corpus: Corpus = "stdlib",
) -> None:
    """Fit exit heads of every kind at several layers in one pass, over all tokens and over draft vocabularies; say how
    often each agrees with the full model on held-out text."""
    fitted = _fit(out, "fit", *to_fit(configs.several(overrides)), pairs, ridge, corpus)
    if fitted is not None:
        _show_fitted(out, fitted)


def to_fit(points: Sequence[RunConfig]) -> tuple[RunConfig, dict[str, Any]]:
    """The point of a grid whose model, engine and workload count, and fields of `fit.Request` that the grid settles.
    Raises ConfigError: several models or engines, a point without a layer, a head's file, or nothing to fit."""
    for cfg in points:
        preflight.check_model(cfg)
        if cfg.head.path is not None:
            raise ConfigError(f"head.path={cfg.head.path}: heads are fitted here, not read")
        if (cfg.model, cfg.engine, cfg.workload) != (points[0].model, points[0].engine, points[0].workload):
            raise ConfigError("one model, engine and workload at a time here; `selfspec sweep` runs several")
        if cfg.layer is None:
            raise ConfigError("layer=null: name the exit layers, such as layer=4,8,12")
    heads = dict.fromkeys(head_spec(cfg.head).name for cfg in points)
    vocabularies = tuple(dict.fromkeys(cfg.vocab for cfg in points))
    if not any(HeadSpec.from_name(name).target for name in heads) and set(vocabularies) == {"full"}:
        raise ConfigError(
            f"head={','.join(heads)}: is not fitted; name what is, such as head=lsq or head=translator_r15"
        )
    request = {
        "layers": tuple(dict.fromkeys(cfg.layer for cfg in points)),
        "heads": tuple(dict.fromkeys(["lens", *heads])),
        "vocabularies": vocabularies,
    }
    return preflight.for_this_machine(points[:1])[0], request


def _fit(
    out: Output, name: str, cfg: RunConfig, request: dict[str, Any], pairs: int, ridge: float | None, corpus: str
) -> FitResult | None:
    preflight.check_folder(cfg.head_dir, "head_dir")
    corpora.check(corpus)
    if out.dry_run:
        out.plan({"model": cfg.model.path, **request, "folder": str(head_folder(cfg))})
        return None
    from selfspec_cli.stages import fit

    with on_engines(out, name, cfg, is_tracked=False) as stage:
        fitted = fit.run(cfg, fit.Request(**request, pairs=pairs, ridge=ridge, corpus=corpus), **stage)
    warn(fitted.warnings)
    return fitted


def _show_fitted(out: Output, fitted: FitResult) -> None:
    out.answer(asdict(fitted), lambda: screen.show_heads(fitted.reports, fitted.seconds))


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
    from selfspec_cli.stages import fit

    cfgs = configs.several(overrides)
    for cfg in cfgs:
        preflight.check(cfg)
    fit.check_weights(cfgs, file)
    if out.dry_run:
        files = [str(file or fit.path_for(cfg)) for cfg in cfgs]
        return out.plan({"model": cfgs[0].model.path, "prompts": prompts, "files": files})
    with on_engines(out, "fit-weights", cfgs[0], is_tracked=False) as stage:
        fitted = fit.run_weights(cfgs, prompts=prompts, out=file, **stage)
    out.answer({"files": [{**asdict(one), "medians": one.medians} for one in fitted]}, lambda: _show_copies(fitted))


def _show_copies(fitted: list[Fitted]) -> None:
    for one in fitted:
        shares = ", ".join(f"{name} {share:.5f}" for name, share in one.medians.items())
        say(f"{one.kind}: {shares} of a product's mean square is lost (medians over the layers)")
        say(f"    draft_weights={one.kind} draft_weights_path={one.path}")
    say(f"{fitted[0].tokens} tokens, {fitted[-1].seconds:.0f} s", "bold")


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
    _show_choice(document, serving)
    deploying.show(deploy)


def _show_choice(document: dict[str, Any], words: Sequence[str]) -> None:
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
