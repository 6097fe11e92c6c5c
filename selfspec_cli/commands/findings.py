"""What `ppl` and `eval` share: check, plan, find on real engines, show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from selfspec_cli.commands.configs import NO_COMPILER
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, say, show_facts, warn
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.record import quality
from selfspec_cli.record.quality import Finding
from selfspec_cli.stages import arms, preflight
from selfspec_cli.stages.arms import Found

if TYPE_CHECKING:
    from selfspec_cli.stages.ppl import Request

NOT_DRAFTED = (
    "Only generated answers go through drafting. The other scores are log-likelihoods, which an engine computes "
    "without drafts: of an arm that verifies its drafts they are the baseline's by construction."
)
GENERATED = (
    "PPL of text is of the arm's own predictions, so only the baseline and skip have one. PPL of greedy and of sampled "
    "is of what the arm generated, under the plain model."
)


def ppl(cfgs: list[RunConfig], request: Request, *, as_json: bool, dry_run: bool, debug: bool) -> None:
    """Perplexities of the baseline and of every arm; the exit code says how it went."""
    from selfspec_cli.stages import ppl as stage

    request.check()

    def find(runs: list[RunConfig], **more: Any) -> Found:
        return stage.run(runs, request, **more)

    facts = {
        "text": quality.in_words(request.of_text(request.documents)),
        "generated": quality.in_words(request.of_generated()),
    }
    _run("ppl", cfgs, facts, find, _perplexities, GENERATED, as_json=as_json, dry_run=dry_run, debug=debug)


def evaluate(
    cfgs: list[RunConfig], tasks: Sequence[str], limit: int, fewshot: int, *, as_json: bool, dry_run: bool, debug: bool
) -> None:
    """Scores of the baseline and of every arm; the exit code says how it went."""
    from selfspec_cli.stages import evaluate as stage

    names = [name.strip() for name in tasks if name.strip()]
    loaded = [] if dry_run else stage.load(names, seed=cfgs[0].seed)
    if dry_run:
        stage.check(names)

    def find(runs: list[RunConfig], **more: Any) -> Found:
        return stage.run(runs, loaded, limit=limit, fewshot=fewshot, **more)

    facts = {"tasks": " ".join(names), "limit": limit, "fewshot": fewshot}
    _run("eval", cfgs, facts, find, _scores, NOT_DRAFTED, as_json=as_json, dry_run=dry_run, debug=debug)


def _run(
    command: str,
    cfgs: list[RunConfig],
    facts: dict[str, Any],
    find: Callable[..., Found],
    table: Callable[[list[Finding]], Table],
    note: str,
    *,
    as_json: bool,
    dry_run: bool,
    debug: bool,
) -> None:
    preflight.check_all(cfgs)
    asked = [preflight.with_calibration(cfg) for cfg in cfgs]
    runs = preflight.for_this_machine(asked)
    warn([NO_COMPILER] if runs != asked else [])
    if dry_run:
        names = [arms.label(one) for family in arms.families(runs) for one in family]
        if as_json:
            return emit({"dry_run": True, **facts, "arms": names})
        return show_facts(facts | {"arms": "\n".join(names)})
    preflight.check_device(runs[0])
    results = Path(runs[0].results_dir)
    with tracked(command, runs[0]), at_work(command, results, debug) as shown:
        found = find(runs, open_engine=shown_starting(shown), progress=shown)
    warn([*found.warnings, *(f"{one.arm}: {one.reason}" for one in found.failed)])
    folder = results / quality.FOLDER
    if as_json:
        rows = [{"arm": one.arm, "kind": one.kind, **_columns(one)} for one in found.findings]
        failed = [asdict(one) for one in found.failed]
        emit({"findings": rows, "failed": failed, "warnings": found.warnings, "folder": folder, "note": note})
    else:
        Console(width=None if Console().is_terminal else 200).print(table(found.findings))
        say(f"{note}\nkept in {folder}")
    raise typer.Exit(found.exit_code)


def _columns(finding: Finding) -> dict[str, Any]:
    book = quality.Book({(finding.kind, finding.arm_key): finding})
    return book.columns(finding.arm_key, "")


def _perplexities(found: list[Finding]) -> Table:
    """One line an arm; ΔPPL beside each perplexity, with its interval."""
    names = ("ppl", "delta_ppl", "ppl_of_greedy", "delta_ppl_of_greedy", "ppl_of_sampled", "delta_ppl_of_sampled")
    heads = ("PPL of text", "Δ", "PPL of greedy", "Δ", "PPL of sampled", "Δ")
    table = _table(("arm", *heads, "identical", "accept"))
    lines: dict[str, tuple[Finding, dict[str, Any]]] = {}
    for one in found:
        _, columns = lines.get(one.arm_key, (one, {}))
        greedy = one.found.get(quality.GREEDY, {})
        more = {"same": f"{greedy['identical']}/{greedy['outputs']}"} if "identical" in greedy else {}
        more |= {"accept": f"{greedy['accepted'] / greedy['drafted']:.0%}"} if greedy.get("drafted") else {}
        lines[one.arm_key] = one, columns | _columns(one) | more
    for one, columns in lines.values():
        cells = [_value(columns, name, sign=name.startswith("delta")) for name in names]
        table.add_row(quality.arm_in_words(one.arm), *cells, columns.get("same", ""), columns.get("accept", ""))
    return table


def _value(columns: dict[str, Any], name: str, *, sign: bool) -> str:
    value, low, high = (columns.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    text = "{:+.3f}" if sign else "{:.3f}"
    ends = f" ({text.format(low)} to {text.format(high)})" if low is not None and high is not None else ""
    return text.format(value) + ends


def _scores(found: list[Finding]) -> Table:
    """One line an arm and score."""
    table = _table(("arm", "task", "metric", "score", "std. error", "samples", "same answers", "goes through drafting"))
    for one in found:
        for score in one.found["scores"]:
            error = "" if score["stderr"] is None else f"{score['stderr']:.4f}"
            same = "" if score["same"] is None else f"{score['same']}/{score['samples']}"
            cells = (score["task"], score["metric"], f"{score['value']:.4f}", error, str(score["samples"]), same)
            table.add_row(quality.arm_in_words(one.arm), *cells, "yes" if score["drafted"] else "no")
    return table


def _table(heads: Sequence[str]) -> Table:
    table = Table(header_style="bold", box=None)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table
