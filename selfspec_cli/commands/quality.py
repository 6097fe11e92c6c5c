"""`selfspec ppl` and `selfspec eval`: the quality of what arms generate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import FINDINGS_KEPT, Output, emit, say, warn
from selfspec_cli.commands.shared import Corpus, Overrides, command
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.record import quality
from selfspec_cli.record.quality import Finding
from selfspec_cli.stages import arms, preflight
from selfspec_cli.stages.arms import Found

NOT_DRAFTED = (
    "Only generated answers go through drafting. The other scores are log-likelihoods, which an engine computes "
    "without drafts: of an arm that verifies its drafts they are the baseline's by construction."
)
GENERATED = (
    "PPL of text is of the arm's own predictions, so only the baseline and skip have one. PPL of greedy and of sampled "
    "is of what the arm generated, under the plain model."
)
SCORES = ("arm", "task", "metric", "score", "std. error", "samples", "same answers", "goes through drafting")
PERPLEXITIES = {
    "PPL of text": "ppl",
    "Δ": "delta_ppl",
    "PPL of greedy": "ppl_of_greedy",
    "Δ greedy": "delta_ppl_of_greedy",
    "PPL of sampled": "ppl_of_sampled",
    "Δ sampled": "delta_ppl_of_sampled",
}
"""Headings, and the columns under them, each with its interval."""

Rows = Iterator[Sequence[str]]


@command(
    epilog="Examples: selfspec ppl method=skip layer=4,8,12   ·   selfspec ppl gate=margin --corpus sharegpt.json",
    then=FINDINGS_KEPT,
)
def ppl(
    out: Output,
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
) -> None:
    """Perplexity with intervals: of a text under the arm's own predictions (baseline and skip), and, for every arm, of
    what it generates under the plain model."""
    from selfspec_cli.stages import ppl as stage

    of_text = (corpus, documents, document_tokens, window, stride)
    request = stage.Request(*of_text, prompts, prompt_tokens, length, temperature)
    request.check()
    facts = {
        "text": quality.in_words(request.of_text(request.documents)),
        "generated": quality.in_words(request.of_generated()),
    }
    heads = ("arm", *PERPLEXITIES, "identical", "accept")
    find = partial(stage.run, request=request)
    _run("ppl", configs.several(overrides), facts, find, heads, _perplexities, GENERATED, out)


@command(
    "eval",
    epilog="Examples: selfspec eval gate=margin tau=0.2   ·   selfspec eval --tasks arc_easy,hellaswag --limit 200",
    then=FINDINGS_KEPT,
)
def evaluate(
    out: Output,
    overrides: Overrides = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Names of lm-evaluation-harness, or stdlib_choice and stdlib_line.")
    ] = "stdlib_choice,stdlib_line",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Samples of each task.")] = 100,
    fewshot: Annotated[int, typer.Option("--num-fewshot", min=0, help="Solved examples before each question.")] = 0,
) -> None:
    """Scores of lm-evaluation-harness over the live engine, of the baseline and of every arm, with standard errors."""
    from selfspec_cli.stages import evaluate as stage

    cfgs = configs.several(overrides)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    loaded = [] if out.dry_run else stage.load(names, seed=cfgs[0].seed)
    if out.dry_run:
        stage.check(names)
    facts = {"tasks": " ".join(names), "limit": limit, "fewshot": fewshot}
    find = partial(stage.run, tasks=loaded, limit=limit, fewshot=fewshot)
    _run("eval", cfgs, facts, find, SCORES, _scores, NOT_DRAFTED, out)


def _run(
    command: str,
    cfgs: list[RunConfig],
    facts: dict[str, Any],
    find: Callable[..., Found],
    heads: Sequence[str],
    rows: Callable[[list[Finding]], Rows],
    note: str,
    out: Output,
) -> None:
    runs = configs.runnable(cfgs)
    if out.dry_run:
        names = [arms.label(one) for family in arms.families(runs) for one in family]
        return out.answer(
            {"dry_run": True, **facts, "arms": names}, lambda: out.plan(facts | {"arms": "\n".join(names)})
        )
    preflight.check_device(runs[0])
    folder = Path(runs[0].results_dir) / quality.FOLDER
    with on_engines(out, command, runs[0]) as stage:
        found = find(runs, **stage)
    warn([*found.warnings, *(f"{one.arm}: {one.reason}" for one in found.failed)])
    if out.as_json:
        findings = [{"arm": one.arm, "kind": one.kind, **_columns(one)} for one in found.findings]
        failed = [asdict(one) for one in found.failed]
        emit({"findings": findings, "failed": failed, "warnings": found.warnings, "folder": folder, "note": note})
    else:
        screen.table(heads, rows(found.findings))
        say(f"{note}\nkept in {folder}")
    raise typer.Exit(found.exit_code)


def _columns(finding: Finding) -> dict[str, Any]:
    book = quality.Book({(finding.kind, finding.arm_key): finding})
    return book.columns(finding.arm_key, "")


def _perplexities(findings: list[Finding]) -> Rows:
    """One row an arm; ΔPPL beside each perplexity, with its interval."""
    lines: dict[str, tuple[Finding, dict[str, Any]]] = {}
    for finding in findings:
        _, columns = lines.get(finding.arm_key, (finding, {}))
        greedy = finding.found.get(quality.GREEDY, {})
        more = {"same": f"{greedy['identical']}/{greedy['outputs']}"} if "identical" in greedy else {}
        more |= {"accept": f"{greedy['accepted'] / greedy['drafted']:.0%}"} if greedy.get("drafted") else {}
        lines[finding.arm_key] = finding, columns | _columns(finding) | more
    for finding, columns in lines.values():
        cells = [_value(columns, name, sign=name.startswith("delta")) for name in PERPLEXITIES.values()]
        yield quality.arm_in_words(finding.arm), *cells, columns.get("same", ""), columns.get("accept", "")


def _value(columns: dict[str, Any], name: str, *, sign: bool) -> str:
    value, low, high = (columns.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    text = "{:+.3f}" if sign else "{:.3f}"
    ends = f" ({text.format(low)} to {text.format(high)})" if low is not None and high is not None else ""
    return text.format(value) + ends


def _scores(findings: list[Finding]) -> Rows:
    for finding in findings:
        for score in finding.found["scores"]:
            error = "" if score["stderr"] is None else f"{score['stderr']:.4f}"
            same = "" if score["same"] is None else f"{score['same']}/{score['samples']}"
            cells = (score["task"], score["metric"], f"{score['value']:.4f}", error, str(score["samples"]), same)
            yield quality.arm_in_words(finding.arm), *cells, "yes" if score["drafted"] else "no"
