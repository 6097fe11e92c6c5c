"""The command line: words in, exit codes out. Every command is a few lines; the work is in stages/.

Exit codes: 0 all went well, 1 a run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from selfspec_cli import __version__
from selfspec_cli.commands import cloud, configs, deploying, findings, runs, screen
from selfspec_cli.commands.help import TakesSettings
from selfspec_cli.commands.measuring import Ways, measure, shown_starting
from selfspec_cli.commands.screen import FINDINGS_KEPT, GOES_ON, PULL_GOES_ON, ROWS_KEPT, emit, guard, say, warn
from selfspec_cli.commands.working import at_work
from selfspec_cli.config import options
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import old_words
from selfspec_cli.report.formats import Format
from selfspec_cli.stages import doctor as doctor_stage
from selfspec_cli.stages import head_plan, preflight
from selfspec_cli.terminal import kept_apart
from selfspec_cli.texts import corpora


class HeadFormat(StrEnum):
    """What a fitted head is written as."""

    safetensors = "safetensors"
    pt = "pt"


app = typer.Typer(
    name="selfspec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Early-exit self-speculative decoding inside vLLM, measured.",
    epilog="Try: selfspec sweep gate=varH tau_v=4,5,6",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(runs.app, name="runs")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Hydra overrides, such as model=llama3_8b layer=8 workload.batch=1,4"),
]
Json = Annotated[bool, typer.Option("--json", help="End stdout with one line of JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run; start no engine.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and all that vLLM and its libraries print.")]
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
def main(ctx: typer.Context, version: Version = False) -> None:
    """Early-exit self-speculative decoding inside vLLM, measured."""
    answer = old_words.answer_for_environment(os.environ, ctx.invoked_subcommand or "COMMAND")
    warn([answer] if answer else [])


@app.command(epilog="Example: selfspec doctor model=/models/llama3", cls=TakesSettings)
def doctor(overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say whether a run could work here: versions, device, patched vLLM names, compiler, model, settings."""
    with guard(as_json, debug):
        cfg = configs.one(overrides, None)
        with TemporaryDirectory(prefix="selfspec-") as scratch, kept_apart(Path(scratch) / "doctor.log"):
            checks = doctor_stage.run(cfg, _patches)
        fine = doctor_stage.could_run(checks)
        if as_json:
            emit({"ok": fine, "checks": [asdict(check) for check in checks]})
        else:
            screen.show_checks(checks)
            say("A run could work here." if fine else "A run could not work here.", "bold")
        raise typer.Exit(0 if fine else 1)


@app.command(
    epilog="Examples: selfspec pull model=HuggingFaceTB/SmolLM2-135M-Instruct   ·   selfspec pull model=ORG/NAME "
    "model.revision=COMMIT draft_weights=int4 engine=h100",
    cls=TakesSettings,
)
def pull(overrides: Overrides = None, as_json: Json = False, dry_run: DryRun = False, debug: Debug = False) -> None:
    """Download a model from the Hugging Face Hub: only what vLLM reads, at one commit; go on after a break."""
    with guard(as_json, debug, PULL_GOES_ON):
        from selfspec_cli.commands import pulling

        pulling.pull(configs.one(overrides, None), as_json=as_json, dry_run=dry_run)


@app.command("options", epilog="Examples: selfspec options   ·   selfspec options gate   ·   selfspec options --json")
def show_options(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Show only what holds this word in its name or description.")
    ] = "",
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table that docs/options.md holds.")] = False,
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
        ways = Ways(again=True, reuse_baseline=reuse_baseline)
        measure("bench", runs, ways, as_json=as_json, dry_run=dry_run, debug=debug)


@app.command(
    epilog="Examples: selfspec sweep gate=varH tau_v=4,5,6   ·   selfspec sweep experiment=m3_maxp layer=4",
    cls=TakesSettings,
)
def sweep(
    overrides: Overrides = None,
    config: Config = None,
    again: Annotated[bool, typer.Option("--again", help="Measure finished points once more.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Only the points that an earlier command could not measure.")
    ] = False,
    max_hours: Annotated[
        float | None,
        typer.Option("--max-hours", min=0, help="Begin no point later than that; the same command goes on."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Make the page again after points; a browser that shows it keeps up.")
    ] = False,
    reuse_baseline: ReuseBaseline = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Measure every point of comma lists and ranges, and the baseline; points that are finished are skipped."""
    with guard(as_json, debug, ROWS_KEPT if again else GOES_ON):
        if again and retry_failed:
            raise ConfigError("--again measures finished points too, --retry-failed only those that failed: give one")
        runs = configs.several(overrides, config=config)
        if runs[0].launcher.kind == "sky":
            return cloud.launch(runs[0], overrides or [], as_json=as_json, dry_run=dry_run)
        ways = Ways(again, reuse_baseline, retry_failed, max_hours, watch)
        measure("sweep", runs, ways, as_json=as_json, dry_run=dry_run, debug=debug)


@app.command(
    epilog="Examples: selfspec profile layer=3 k=4   ·   selfspec profile method=baseline workload.batch=8",
    cls=TakesSettings,
)
def profile(
    overrides: Overrides = None,
    config: Config = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Of each request, at most so many.")] = 64,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with NVIDIA Nsight Systems too, in a run more.")] = False,
    inside: Annotated[bool, typer.Option("--under-nsight", hidden=True)] = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Where the time of one arm goes: drafting, verifying, sampling, scheduling, idle; its slowest kernels; a trace."""
    with guard(as_json, debug):
        from selfspec_cli.commands import profiling

        cfg = configs.one(overrides, config)
        if inside:
            return profiling.under_nsight(cfg, tokens)
        words = [*(overrides or []), *(["--config", str(config)] if config else []), "--tokens", str(tokens)]
        profiling.profile(cfg, words, tokens, nsys=nsys, as_json=as_json, dry_run=dry_run, debug=debug)


Pairs = Annotated[int, typer.Option("--pairs", min=1, help="(hidden state, target) pairs to fit.")]
Corpus = Annotated[
    str,
    typer.Option(
        "--corpus",
        help="stdlib, a text file, a .json, .jsonl or .parquet (ShareGPT, or FILE:COLUMN), "
        "hf:NAME\\[@CONFIG][:SPLIT[:COLUMN]] such as hf:org/set@en:train[:1%]:text, or random.",
    ),
]


Ridge = Annotated[
    float | None, typer.Option("--ridge", help="Relative ridge, 0 for none; chosen on held-out pairs if absent.")
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
        if dry_run:
            plan = {"model": cfg.model.path, "layers": layer, "pairs": pairs, "corpus": corpus, "ridge": ridge,
                    "folder": str(head_folder(cfg))}  # fmt: skip
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


@app.command(
    "fit",
    epilog="Example: selfspec fit head=lsq,lsq_argmax,translator_r15 layer=4,8,12 vocab=full,4096",
    cls=TakesSettings,
)
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
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.stages import fit

        with at_work("fit", plan.cfg.results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            fitted = fit.run(plan.cfg, **plan.request(), pairs=pairs, ridge=ridge, corpus=corpus, **more)
        warn(fitted.warnings)
        emit(asdict(fitted)) if as_json else screen.show_heads(fitted.reports, fitted.seconds)


@app.command(
    "fit-weights",
    epilog="Example: selfspec fit-weights model=smollm2_135m workload=chat draft_weights=int4,int8",
    cls=TakesSettings,
)
def fit_draft_weights(
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Answers of the model to fit on.")] = 32,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; one beside the model's heads.")] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Make copies of the weights for drafting from what the model sees (GPTQ); draft_weights_path=FILE uses
    them."""
    with guard(as_json, debug):
        from selfspec_cli.stages import fit_weights

        cfgs = configs.several(overrides)
        preflight.check_all(cfgs)
        fit_weights.check(cfgs, out)
        if dry_run:
            files = [str(out or fit_weights.path_for(cfg)) for cfg in cfgs]
            plan = {"model": cfgs[0].model.path, "prompts": prompts, "files": files}
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with at_work("fit-weights", cfgs[0].results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            made = fit_weights.run(cfgs, prompts=prompts, out=out, **more)
        if as_json:
            return emit({"files": [{**asdict(one), "medians": one.medians} for one in made]})
        screen.show_fitted_weights(made)


@app.command("heads", epilog="Example: selfspec heads layer=2,4,8,12 vocab=full,1024", cls=TakesSettings)
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
        corpora.check(corpus)
        if dry_run:
            return emit({"dry_run": True, **plan.facts()}) if as_json else screen.show_facts(plan.facts())
        from selfspec_cli.report import heads as heads_figure
        from selfspec_cli.stages import heads as compare

        with at_work("heads", plan.cfg.results_dir, debug) as shown:
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


@app.command(
    "views",
    epilog="Examples: selfspec views model=smollm2_135m workload=chat draft_weights=fp8,int8,int4   ·   selfspec views "
    "model=smollm2_135m workload=chat draft_weights=int8 --drop 6",
    cls=TakesSettings,
)
def compare_views(
    overrides: Overrides = None,
    drop: Annotated[
        int, typer.Option("--drop", min=0, help="Look for up to so many layers that the draft can do without.")
    ] = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Compare views of the model as drafts (layers, skip_layers, draft_weights): acceptance at each position, bytes,
    predicted speedup; views share an engine."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.stages import views as views_stage

        cfgs = configs.several(overrides)
        preflight.check_all(cfgs)
        if dry_run:
            plan = views_stage.facts(cfgs, drop)
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        with at_work("views", cfgs[0].results_dir, debug) as shown:
            found = views_stage.run(cfgs, open_engine=shown_starting(shown), drop=drop, progress=shown)
        emit(found.document()) if as_json else screen.show_views(found)


@app.command(
    epilog="Examples: selfspec roc   ·   selfspec roc layer=4,8 head=lens,translator --prompts 64", cls=TakesSettings
)
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
        with at_work("roc", cfgs[0].results_dir, debug) as shown:
            more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
            result = roc_stage.run(cfgs, longest=longest, prompts=prompts, **more)
        result.files |= report_stage.roc_figures(Path(result.files["table"]).parent)
        deploy = deploying.chosen("roc", result.config, result.choice()["expected_speedup"])
        if as_json:
            document = {"choice": result.choice(), "files": result.files, "deploy": deploy}
            emit({"rows": [asdict(row) for row in result.rows], **document})
        else:
            screen.show_roc(result.rows, result.choice(), result.files)
            deploying.show(deploy)


@app.command(
    epilog="Examples: selfspec tune model=llama3_8b layer=4,8   and then: selfspec sweep tuned=llama3_8b",
    cls=TakesSettings,
)
def tune(
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="How many minutes the search may take.")] = 14,
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
        warn(tune_stage.costly_copies(cfgs))
        model = [word for word in words if word.startswith(("model=", "model."))] or [f"model={cfgs[0].model.name}"]
        with at_work("tune", cfgs[0].results_dir, debug) as shown:
            result = tune_stage.run(
                cfgs,
                open_engine=shown_starting(shown),
                budget=Budget(minutes, trials),
                conf=Path("conf"),
                heads=heads,
                loads=at,
                model_words=model,
                progress=shown,
            )
        warn(result.warnings)
        document = tune_stage.document(result)
        serving = [f"tuned={document['tuned']}", *deploying.of_server(words)]
        deploy = deploying.chosen("tune", result.choice.cfg, result.choice.speedup, serving)
        if as_json:
            emit(document | {"deploy": deploy})
        else:
            screen.show_tuned(document)
            deploying.show(deploy)


@app.command(
    epilog="Examples: selfspec serve tuned=llama3_8b engine=h100   ·   selfspec serve layer=3 k=4 gate=margin -- "
    "--port 8001 --api-key KEY   ·   selfspec serve tuned=llama3_8b engine=h100 replicas=2",
    cls=TakesSettings,
)
def serve(
    overrides: Overrides = None,
    config: Config = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with draft settings; what you type after -- is handed to vLLM unchanged.
    replicas=N starts N servers, each on GPUs of its own, behind one address."""
    with guard(as_json, debug):
        from selfspec_cli.stages import replicas

        words = list(overrides or [])
        split = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        count, router, own = replicas.asked(words[:split])
        cfg = configs.one(own, config)
        deploying.serve(cfg, words[split:], count, router, as_json=as_json, dry_run=dry_run)


@app.command(
    epilog="Examples: selfspec load experiment=soak   ·   selfspec load layer=3 k=4 load.clients=1,8,32   ·   "
    "selfspec load load.share=0.3,0.6,0.9 --tpot-limit 50   ·   selfspec load --url http://localhost:8000 load.rate=2",
    cls=TakesSettings,
)
def load(
    overrides: Overrides = None,
    config: Config = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask the server that runs there, instead of starting servers.")
    ] = None,
    baseline_url: Annotated[
        str | None, typer.Option("--baseline-url", help="With --url: a server to compare it with.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="With --url: which of its models; its first one.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --url: ask for chats, not for completions.")] = False,
    ttft_limit: Annotated[float | None, typer.Option("--ttft-limit", help="As load.ttft_limit, ms.")] = None,
    tpot_limit: Annotated[float | None, typer.Option("--tpot-limit", help="As load.tpot_limit, ms.")] = None,
    e2e_limit: Annotated[float | None, typer.Option("--e2e-limit", help="As load.e2e_limit, ms.")] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Load-test servers: closed loop, Poisson or bursty arrivals, a soak; the baseline and each arm, one after the
    other, or one that runs already. What stands behind -- goes to the servers that are started."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.commands import loading

        words = list(overrides or [])
        split = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        more = words[split:]
        words = [*words[:split], *loading.limits(ttft_limit, tpot_limit, e2e_limit)]
        runs = loading.as_loads(configs.several(words, config=config))
        how = {"as_json": as_json, "dry_run": dry_run, "debug": debug}
        if url is None:
            loading.refuse_without_url(baseline_url=baseline_url, served_model=served_model, chat=chat)
            return loading.own_servers(runs, more, **how)
        knows = config is not None or any(word.startswith(("model=", "model.")) for word in words)
        where = loading.Elsewhere(url, baseline_url, served_model, chat, knows and not chat)
        loading.elsewhere(loading.of_elsewhere(runs), where, **how)


@app.command(
    epilog="Examples: selfspec gateway demo   ·   selfspec gateway two_servers policy=round_robin port=8080   ·   "
    "selfspec gateway mine.yaml"
)
def gateway(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE.yaml [KEY=VALUE]", help="One of conf/gateway/, or a file; docs/gateway.md."),
    ] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Route requests to several servers: the best one for each, streams that survive, what it won. `demo` shows it."""
    with guard(as_json, debug):
        from selfspec_cli.commands import gateway as serving

        serving.gateway(words or [], as_json=as_json, dry_run=dry_run)


@app.command(
    epilog="Examples: selfspec ppl method=skip layer=4,8,12   ·   selfspec ppl gate=varH --corpus sharegpt.json",
    cls=TakesSettings,
)
def ppl(
    overrides: Overrides = None,
    corpus: Corpus = "stdlib",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Score at most this many documents.")] = 1000,
    document_tokens: Annotated[
        int, typer.Option("--document-tokens", min=2, help="Score this many tokens from the start of each document.")
    ] = 2048,
    window: Annotated[int, typer.Option("--window", min=2, help="Length of the rolling window in tokens.")] = 512,
    stride: Annotated[
        int, typer.Option("--stride", min=1, help="Tokens that each window after the first scores.")
    ] = 256,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Held-out prompts that every arm continues.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of each prompt.")] = 32,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens that each prompt is continued by.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Temperature of the sampled continuations.")
    ] = 1.0,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Perplexity with intervals: of a text under the arm's own predictions (baseline and skip), and, for every arm, of
    what it generates under the plain model."""
    with guard(as_json, debug, FINDINGS_KEPT):
        from selfspec_cli.stages.ppl import Request

        of_text = (corpus, documents, document_tokens, window, stride)
        request = Request(*of_text, prompts, prompt_tokens, length, temperature)
        findings.ppl(configs.several(overrides), request, as_json=as_json, dry_run=dry_run, debug=debug)


@app.command(
    "eval",
    epilog="Examples: selfspec eval gate=varH tau_v=5   ·   selfspec eval --tasks arc_easy,hellaswag --limit 200",
    cls=TakesSettings,
)
def evaluate(
    overrides: Overrides = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Names of lm-evaluation-harness, or stdlib_choice and stdlib_line.")
    ] = "stdlib_choice,stdlib_line",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples of each task.")] = 100,
    fewshot: Annotated[int, typer.Option("--num-fewshot", min=0, help="Solved examples before each question.")] = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Scores of lm-evaluation-harness over the live engine, of the baseline and of every arm, with standard errors."""
    with guard(as_json, debug, FINDINGS_KEPT):
        runs, names = configs.several(overrides), tasks.split(",")
        findings.evaluate(runs, names, limit, fewshot, as_json=as_json, dry_run=dry_run, debug=debug)


@app.command(
    epilog="Examples: selfspec verify layer=3 k=4   ·   selfspec verify model=llama3_8b engine=h100 --batch-invariant",
    cls=TakesSettings,
)
def verify(
    overrides: Overrides = None,
    config: Config = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="More requests, every gate, every way to sample.")
    ] = False,
    only: Annotated[str, typer.Option("--cases", help="Only these cases: NAME,NAME. Case mixed is always run.")] = "",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="With vLLM's batch-invariant kernels (CUDA): no token may differ.")
    ] = False,
    near_tie: Annotated[
        float | None,
        typer.Option("--near-tie", min=0, help="Gap in nats up to which two tokens count as equally likely."),
    ] = None,
    no_sampling: Annotated[bool, typer.Option("--no-sampling", help="Leave out sampled requests.")] = False,
    probabilistic: Annotated[
        bool, typer.Option("--probabilistic", help="Draw drafts at random, as draft_sample_method=probabilistic does.")
    ] = False,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant this fault, or all of them in turn: each must be named.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs on the same engines, each with a new seed.")] = 1,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Show that an arm is lossless here: compare greedy and sampled outputs with those of an engine without drafts."""
    with guard(as_json, debug):
        from selfspec_cli.commands import verifying

        verifying.refuse_two_ways(overrides, probabilistic)
        cfg = configs.one(overrides, config)
        wanted = verifying.wanted(thorough, only, batch_invariant, near_tie, no_sampling, probabilistic, plant, repeat)
        document = verifying.verify(cfg, wanted, dry_run=dry_run, debug=debug)
        emit(document) if as_json else verifying.show(document)
        raise typer.Exit(verifying.exit_code(document))


@app.command(
    epilog="Examples: selfspec gate experiments/gates/cpu_micro.yaml   ·   selfspec gate experiments/gates/h100_8b.yaml"
    " results_dir=results/h100 --junit gates.xml"
)
def gate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One of experiments/gates/; docs/performance_gates.md.")],
    overrides: Overrides = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML, too.")] = None,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a fault that costs speed: the verdict must be red.")
    ] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Performance gate: is the speed still what FILE asks for? (The gate of a draft is the setting gate=.) Exit code 0:
    green; 1: red, or not measurable, which the last line says; 2: bad input, or its micro gate was not green yet."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.commands import gating

        gating.gate(file, overrides or [], plant=plant, junit=junit, as_json=as_json, dry_run=dry_run, debug=debug)


Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="Only rows that meet a condition: gate=varH, speedup>1.5, status~memory; repeatable."),
]
Folder = Annotated[
    list[str] | None, typer.Argument(metavar="[results_dir=FOLDER]", help="The folder that holds the results.")
]


@app.command(
    epilog="Examples: selfspec report   ·   selfspec report results_dir=results/mine --format md   ·   "
    "selfspec report --compare results/before results/after"
)
def report(
    overrides: Folder = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the page and figures, if not results_dir.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="html writes the page; the others go to stdout.")
    ] = Format.html,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Two folders, or two of one folder's git revisions, machines or "
            "runs: what differs, and whether it is more than noise.",
        ),
    ] = None,
    where: Where = None,
    figures: Annotated[bool, typer.Option("--figures", help="Write each figure as SVG and PNG too.")] = False,
    reload: Annotated[int, typer.Option("--reload", min=0, hidden=True)] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what was measured: tables here, and a self-contained page (HTML) with figures; or compare two sets."""
    with guard(as_json, debug):
        from selfspec_cli.commands import reporting

        folder = configs.results_dir(overrides)
        if compare is not None:
            reporting.compare(folder, compare, where or [], Format.json if as_json else form)
        elif form is not Format.html:
            reporting.as_text(folder, where or [], form)
        else:
            reporting.page(folder, out or folder, where or [], figures, as_json, reload)


@app.command(
    epilog="Examples: selfspec export results_dir=results/mine   ·   selfspec export results_dir=results/mine "
    "--archive results/published/mine.jsonl.xz"
)
def export(
    overrides: Folder = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the tables, if not results_dir.")] = None,
    packed: Annotated[
        Path | None, typer.Option("--archive", help="Write the folder as one file NAME.jsonl.xz, to publish it.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the tables of a results folder again from its points, or pack the folder into one file."""
    with guard(as_json, debug):
        from selfspec_cli.commands import reporting

        made = reporting.export(configs.results_dir(overrides), out, packed)
        emit(made) if as_json else screen.show_facts(made)


def _patches() -> list[tuple[str, bool, str]]:
    from selfspec_cli.vllm_plugin import compat

    return [(name, found, reason) for name, found, reason in compat.check()]
