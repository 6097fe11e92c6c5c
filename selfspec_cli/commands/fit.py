"""`selfspec fit`, `fit-lsq` and `fit-weights`: fit exit heads and copies of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import Output, say, warn
from selfspec_cli.commands.shared import Corpus, Overrides, Pairs, Ridge, command
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, RunConfig, head_spec
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.stages import preflight
from selfspec_cli.texts import corpora

if TYPE_CHECKING:
    from selfspec_cli.stages.fit import FitResult
    from selfspec_cli.stages.fit_weights import Fitted


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
    """The point of a grid whose model, engine and workload count, and the arguments of `fit.run` that the grid settles;
    the lens is always among the heads, to be compared with.

    Raises:
        ConfigError: points of more than one model or engine, a point without a layer, a head given as a file, or
            nothing but heads over the full vocabulary that need no fit.
    """
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
    """Fit the heads that `to_fit` names; None for a dry run."""
    preflight.check_folder(cfg.head_dir, "head_dir")
    corpora.check(corpus)
    if out.dry_run:
        out.plan({"model": cfg.model.path, **request, "folder": str(head_folder(cfg))})
        return None
    from selfspec_cli.stages import fit

    with on_engines(out, name, cfg, is_tracked=False) as stage:
        fitted = fit.run(cfg, **request, pairs=pairs, ridge=ridge, corpus=corpus, **stage)
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
    from selfspec_cli.stages import fit_weights

    cfgs = configs.several(overrides)
    preflight.check_all(cfgs)
    fit_weights.check(cfgs, file)
    if out.dry_run:
        files = [str(file or fit_weights.path_for(cfg)) for cfg in cfgs]
        return out.plan({"model": cfgs[0].model.path, "prompts": prompts, "files": files})
    with on_engines(out, "fit-weights", cfgs[0], is_tracked=False) as stage:
        fitted = fit_weights.run(cfgs, prompts=prompts, out=file, **stage)
    out.answer({"files": [{**asdict(one), "medians": one.medians} for one in fitted]}, lambda: _show_copies(fitted))


def _show_copies(fitted: list[Fitted]) -> None:
    """What each file loses of a product's mean square, and how to use it."""
    for one in fitted:
        shares = ", ".join(f"{name} {share:.5f}" for name, share in one.medians.items())
        say(f"{one.kind}: {shares} of a product's mean square is lost (medians over the layers)")
        say(f"    draft_weights={one.kind} draft_weights_path={one.path}")
    say(f"{fitted[0].tokens} tokens, {fitted[-1].seconds:.0f} s", "bold")
