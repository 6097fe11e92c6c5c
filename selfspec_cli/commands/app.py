"""The command line: words in, exit codes out. Every command is a few lines; the work is in stages/.

Exit codes: 0 all went well, 1 a run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from selfspec_cli import __version__
from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.help import TakesSettings
from selfspec_cli.commands.measuring import measure, open_engine
from selfspec_cli.commands.screen import GOES_ON, ROWS_KEPT, emit, guard, only_stderr, rows_document, say, warn
from selfspec_cli.config import machine, options
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.progress import bars
from selfspec_cli.record import folder as results_folder
from selfspec_cli.report import make as report_stage
from selfspec_cli.stages import doctor as doctor_stage
from selfspec_cli.stages import head_plan, preflight
from selfspec_cli.texts import corpora

app = typer.Typer(
    name="selfspec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Early-exit self-speculative decoding inside vLLM, measured.",
    epilog="Try: selfspec sweep gate=varH tau_v=4,5,6",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Hydra overrides, such as model=llama3_8b layer=8 workload.batch=1,4"),
]
Json = Annotated[bool, typer.Option("--json", help="End stdout with one line of JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run; start no engine.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Start from a dumped config, or from a point: results/runs/ID.json."),
]
ReuseBaseline = Annotated[
    bool,
    typer.Option("--reuse-baseline", help="Compare with a baseline measured earlier on the same machine, versions, "
                 "weights and workload, where there is one."),
]  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        print(f"selfspec {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def main(version: Version = False) -> None:
    """Early-exit self-speculative decoding inside vLLM, measured."""


@app.command(epilog="Example: selfspec doctor model=/models/llama3", cls=TakesSettings)
def doctor(overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say whether a run could work here: versions, device, patched vLLM names, compiler, model, settings."""
    with guard(as_json, debug):
        cfg = configs.one(overrides, None)
        with only_stderr():
            checks = doctor_stage.run(cfg, _patches)
        fine = doctor_stage.could_run(checks)
        if as_json:
            emit({"ok": fine, "checks": [asdict(check) for check in checks]})
        else:
            screen.show_checks(checks)
            say("A run could work here." if fine else "A run could not work here.", "bold")
        raise typer.Exit(0 if fine else 1)


@app.command("options", epilog="Examples: selfspec options   ·   selfspec options gate   ·   selfspec options --json")
def show_options(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only settings and choices that have to do with it.")
    ] = "",
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the table of the documentation.")] = False,
    debug: Debug = False,
) -> None:
    """Every setting: its key, type, unit, range, default and meaning; every gate, head and kind of draft weights."""
    with guard(as_json, debug):
        if markdown:
            return print(options.markdown(), end="")
        rows, choices = options.rows(word), options.choices(word)
        if as_json:
            return emit({"options": [asdict(row) for row in rows], "choices": [asdict(one) for one in choices]})
        screen.show_options(rows, choices)


@app.command(
    epilog="Examples: selfspec bench gate=maxp tau=0.35 layer=4 k=5   ·   selfspec bench experiment=gpu_8b",
    cls=TakesSettings,
)
def bench(
    overrides: Overrides = None,
    config: Config = None,
    reuse_baseline: ReuseBaseline = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Measure one arm, or all of one experiment, and the baseline that each is compared with; always afresh."""
    with guard(as_json, debug, f"{ROWS_KEPT}; selfspec sweep with the same words goes on"):
        whole = any(override.startswith("experiment=") for override in overrides or [])
        runs = configs.several(overrides, sweep=whole, config=config)
        measure(runs, again=True, reuse_baseline=reuse_baseline, as_json=as_json, dry_run=dry_run)


@app.command(
    epilog="Examples: selfspec sweep gate=varH tau_v=4,5,6   ·   selfspec sweep experiment=m3_maxp layer=4",
    cls=TakesSettings,
)
def sweep(
    overrides: Overrides = None,
    config: Config = None,
    again: Annotated[bool, typer.Option("--again", help="Measure finished points once more.")] = False,
    reuse_baseline: ReuseBaseline = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Measure every point of comma lists and ranges, and the baseline; points that are finished are skipped."""
    with guard(as_json, debug, ROWS_KEPT if again else GOES_ON):
        runs = configs.several(overrides, config=config)
        measure(runs, again=again, reuse_baseline=reuse_baseline, as_json=as_json, dry_run=dry_run)


Pairs = Annotated[int, typer.Option("--pairs", min=1, help="(hidden state, target) pairs to fit.")]
Corpus = Annotated[
    str,
    typer.Option(
        "--corpus",
        help="stdlib, a text file, a .json, .jsonl or .parquet (ShareGPT, or FILE:COLUMN), "
        "hf:NAME\\[@CONFIG][:SPLIT[:COLUMN]] such as hf:org/set@en:train[:1%]:text, or random.",
    ),
]


@app.command(
    "fit-lsq",
    epilog="Example: selfspec fit-lsq --layer 12   and then: selfspec sweep head=lens,lsq layer=12",
    cls=TakesSettings,
)
def fit_lsq(
    layer: Annotated[list[int], typer.Option("--layer", help="Exit layer E, after which the head reads; repeatable.")],
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit least-squares exit heads by running the model in vLLM; head=lsq finds them in head_dir."""
    with guard(as_json, debug):
        for one_layer in layer:
            cfg = configs.one([*(overrides or []), f"layer={one_layer}", "head=lens"], None)
            preflight.check(cfg)
        if dry_run:
            plan = {"model": cfg.model.path, "layers": layer, "pairs": pairs, "folder": str(head_folder(cfg))}
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        from selfspec_cli.stages import fit

        with only_stderr(), bars() as progress:
            fitted = fit.run(cfg, layers=layer, pairs=pairs, progress=progress)
        emit(asdict(fitted)) if as_json else screen.show_heads(fitted.reports, fitted.seconds)


@app.command(
    "fit",
    epilog="Example: selfspec fit head=lsq,lsq_argmax,translator_r15 layer=4,8,12 vocab=full,4096",
    cls=TakesSettings,
)
def fit_heads(
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    ridge: Annotated[
        float | None, typer.Option("--ridge", help="Relative ridge, 0 for none; by agreement on held-out pairs.")
    ] = None,
    corpus: Corpus = "stdlib",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit exit heads of every kind at several layers in one pass, over all tokens and over draft vocabularies."""
    with guard(as_json, debug):
        plan = head_plan.to_fit(configs.several(overrides))
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.stages import fit

        with only_stderr(), bars() as progress:
            fitted = fit.run(plan.cfg, **plan.request(), pairs=pairs, ridge=ridge, corpus=corpus, progress=progress)
        emit(asdict(fitted)) if as_json else screen.show_heads(fitted.reports, fitted.seconds)


@app.command("heads", epilog="Example: selfspec heads layer=2,4,8,12 vocab=full,1024", cls=TakesSettings)
def compare_heads(
    overrides: Overrides = None,
    pairs: Pairs = 50_000,
    top: Annotated[int, typer.Option("--top", min=0, help="So many of the best are measured in the engine.")] = 5,
    corpus: Corpus = "stdlib",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Fit and compare heads at every layer asked for: agreement, accepted length, bytes, predicted speedup; measure the
    best ones."""
    with guard(as_json, debug, ROWS_KEPT):
        plan = head_plan.to_compare(overrides or [], configs.several)
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.report import heads as heads_figure
        from selfspec_cli.stages import heads as compare

        with only_stderr(), bars() as progress:
            found = compare.run(plan, pairs=pairs, top=top, corpus=corpus, open_engine=open_engine, progress=progress)
        found.files["figure"] = heads_figure.draw(found.rows, Path(plan.cfg.results_dir) / "heads.png")
        emit(found.document()) if as_json else screen.show_comparison(found)
        raise typer.Exit(found.exit_code)


@app.command(
    epilog="Examples: selfspec roc   ·   selfspec roc layer=4,8 head=lens,translator --prompts 64", cls=TakesSettings
)
def roc(
    overrides: Overrides = None,
    longest: Annotated[int, typer.Option("--longest", min=1, help="Tokens a draft while recording.")] = 12,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Requests recorded at each exit layer.")] = 32,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Log real drafts; say how well each gate tells which will stand, and which gate to use at which threshold."""
    with guard(as_json, debug):
        from selfspec_cli.report import roc as roc_figure
        from selfspec_cli.stages import roc as roc_stage

        cfgs = configs.exits(overrides or [], roc_stage.LAYER_PARTS)
        if dry_run:
            plan = roc_stage.facts(cfgs, longest, prompts)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with only_stderr(), bars() as progress:
            result = roc_stage.run(cfgs, open_engine=open_engine, longest=longest, prompts=prompts, progress=progress)
        png = Path(result.files["table"]).with_name("roc.png")
        result.files["figure"] = str(roc_figure.draw(result.panels, png, machine.device(cfgs[0])))
        if as_json:
            emit({"rows": [asdict(row) for row in result.rows], "choice": result.choice(), "files": result.files})
        else:
            screen.show_roc(result.rows, result.choice(), result.files)


@app.command(
    epilog="Examples: selfspec tune model=llama3_8b layer=4,8   and then: selfspec sweep tuned=llama3_8b",
    cls=TakesSettings,
)
def tune(
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="When to be done.")] = 14,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Optuna trials on each engine.")] = 18,
    loads: Annotated[
        str, typer.Option("--loads", help="Numbers of running requests to find draft lengths for, such as 1,8,32,128.")
    ] = "",
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Find exit layer, head, draft length, gate and threshold for a model and workload; tuned=MODEL uses them."""
    with guard(as_json, debug, GOES_ON):
        from selfspec_cli.stages import tune as tune_stage
        from selfspec_cli.stages.budget import Budget

        words, at = overrides or [], configs.numbers("--loads", loads)
        cfgs = configs.exits(words, tune_stage.LAYER_PARTS)
        heads = [] if any(re.match(r"head[.=]", word) for word in words) else configs.known_heads()
        if dry_run:
            plan = tune_stage.facts(cfgs, minutes, trials, heads, at)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        model = [word for word in words if word.startswith(("model=", "model."))] or [f"model={cfgs[0].model.name}"]
        with only_stderr(), bars() as progress:
            result = tune_stage.run(
                cfgs,
                open_engine=open_engine,
                budget=Budget(minutes, trials),
                conf=Path("conf"),
                heads=heads,
                loads=at,
                model_words=model,
                progress=progress,
            )
        warn(result.warnings)
        emit(tune_stage.document(result)) if as_json else screen.show_tuned(tune_stage.document(result))


Folder = Annotated[
    list[str] | None, typer.Argument(metavar="[results_dir=FOLDER]", help="The folder that holds the results.")
]


@app.command(epilog="Examples: selfspec report   ·   selfspec report results_dir=results/mine --out page")
def report(
    overrides: Folder = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the chart and the page; results_dir.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the table beside the targets; write a bar chart (PNG) and a self-contained page (HTML)."""
    with guard(as_json, debug):
        folder = configs.results_dir(overrides)
        made = report_stage.run(folder, out or folder)
        warn(made.warnings)
        if as_json:
            emit({"rows": rows_document(made.rows), "chart": made.chart, "page": made.page, "warnings": made.warnings})
            return
        from selfspec_cli.report import table

        table.show(made.rows, Console())
        say(f"chart: {made.chart or 'no arm has a speedup yet'}\npage:  {made.page}")


@app.command(epilog="Example: selfspec export results_dir=results/mine")
def export(overrides: Folder = None, as_json: Json = False, debug: Debug = False) -> None:
    """Make summary.csv and accept.tsv of a results folder again from its points."""
    with guard(as_json, debug):
        folder = configs.results_dir(overrides)
        if not (folder / results_folder.RUNS).is_dir():
            raise ConfigError(f"{folder} holds no runs/: nothing was measured there")
        count, warnings = results_folder.export(folder)
        warn(warnings)
        made = {"points": count, "summary": folder / results_folder.SUMMARY, "accept": folder / results_folder.ACCEPT}
        emit(made) if as_json else screen.show_facts(made)


def _patches() -> list[tuple[str, bool, str]]:
    from selfspec_cli.vllm_plugin import compat

    return [(name, found, reason) for name, found, reason in compat.check()]
