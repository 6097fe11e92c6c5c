"""What a user sees: one JSON line or a table, a plan, or an error that fits on a screen."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from selfspec_cli import load_patterns
from selfspec_cli.config.options import Choice, Row
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit import view
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.extras import remedy
from selfspec_cli.record.columns import Record, plain
from selfspec_cli.record.folder import RecordError
from selfspec_cli.record.tables import planned
from selfspec_cli.report.rows import group_title, label
from selfspec_cli.stages.doctor import Check
from selfspec_cli.stages.plan import Plan, Planned, distinguishing_settings

if TYPE_CHECKING:
    from selfspec_cli.stages.fit_weights import Fitted
    from selfspec_cli.stages.heads import Comparison
    from selfspec_cli.stages.views import Views

POINT = (
    "arm",
    "model",
    "k",
    *view.all_columns(),
    "draft_sample_method",
    "gate",
    "threshold",
    "batch",
    *load_patterns.COLUMNS,
    "input_len",
    "output_len",
    "seed",
)
BAD_INPUT, RUN_FAILED, INTERRUPTED = 2, 1, 130

# What is left after an interrupt, and what the same command does then. Commands differ in it.
GOES_ON = "what was measured so far is kept, and the same command goes on from there"
BEGINS_AGAIN = "the same command begins again"
FINDINGS_KEPT = f"what was found of arms that are complete is kept, but {BEGINS_AGAIN}"
PULL_GOES_ON = "files that were fetched are kept, and the same command fetches the rest"
ROWS_KEPT = f"rows measured so far are kept, but {BEGINS_AGAIN}"


@contextmanager
def guard(as_json: bool, debug: bool, then: str = BEGINS_AGAIN) -> Iterator[None]:
    """Exceptions into exit codes and one-screen messages: 2 bad input, 1 the run failed, 130 interrupted.

    then: GOES_ON, or whatever else is true after an interrupt.
    """
    try:
        yield
    except typer.Exit:
        raise
    except (ConfigError, SettingsError) as error:
        _fail(error, str(error), BAD_INPUT, as_json, debug)
    except RecordError as error:
        _fail(error, str(error), RUN_FAILED, as_json, debug)
    except KeyboardInterrupt as error:
        _fail(error, f"interrupted; {then}", INTERRUPTED, as_json, debug)
    except Exception as error:
        advice = _of_disk(error) if isinstance(error, OSError) else None
        advice = remedy(error) if isinstance(error, ModuleNotFoundError) else advice
        if advice:
            _fail(error, advice, BAD_INPUT, as_json, debug)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if debug else "\nThe same command with --debug shows the traceback."
        _fail(error, _shortened(text) + hint, RUN_FAILED, as_json, debug)


NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ELOOP,
                errno.ENAMETOOLONG, errno.EINVAL, errno.EIO, errno.ENOTSUP}  # fmt: skip
"""Why a folder cannot be made or a file written: rights, a name that is taken, too long or not allowed, the disk."""


def _of_disk(error: OSError) -> str | None:
    """What to do about a folder of results or heads that cannot be written, or a full disk; None for other errors."""
    place = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}: {error.strerror}; free some space, or choose a folder on another disk (results_dir=)"
    if error.errno not in NOT_WRITABLE or error.filename is None or not _is_written_to(Path(os.fsdecode(place))):
        return None  # such as a program that may not be run: the error names it
    return f"{place}: {error.strerror}; choose another folder (results_dir=, head_dir=), or make this one writable"


def _is_written_to(place: Path) -> bool:
    """Whether a place is one of this command's folders of results and heads, as they were typed or by default, a file
    in one that is there, or a folder above."""
    default = {name: getattr(RunConfig(), name) for name in ("results_dir", "head_dir")}
    typed = [value for name, _, value in (word.partition("=") for word in sys.argv) if name in default]
    for folder in map(Path, [*default.values(), *typed]):
        inside, above = (one.absolute().is_relative_to(other.absolute()) for one, other in
                         ((place, folder), (folder, place)))  # fmt: skip
        if inside or (above and not os.path.isdir(place)):
            return True
    return False


def _shortened(text: str, lines: int = 12, width: int = 2000) -> str:
    """The beginning and the end of a long message, where its point usually is."""
    parts = text[:width].splitlines()
    return "\n".join(parts if len(parts) <= lines else [*parts[: lines // 2], "...", *parts[-lines // 2 :]])


def _fail(error: BaseException, message: str, code: int, as_json: bool, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    out = Console(stderr=True)  # whole words on a terminal, whole lines elsewhere
    out.print(Text.assemble(("selfspec: ", "bold red"), message), soft_wrap=not out.is_terminal)
    if as_json:
        emit({"error": message, "exit_code": code})
    raise typer.Exit(code) from error


def emit(document: dict[str, Any]) -> None:
    """One JSON document on one line, the last of stdout."""
    print(json.dumps(document, default=str), flush=True)


def say(text: str = "", style: str = "") -> None:
    """A line for people, on stdout."""
    Console(soft_wrap=True).print(Text(text, style=style))


def warn(messages: list[str]) -> None:
    """Lines for people that are not results, on stderr."""
    for message in messages:
        Console(stderr=True, soft_wrap=True).print(Text(f"warning: {message}", style="yellow"))


def note(message: str) -> None:
    """A line for people about what goes on, on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text(message))


def point(chosen: Planned) -> dict[str, Any]:
    """A point of a plan: what would be measured."""
    row = planned(chosen.cfg, chosen.key)
    return {"key": chosen.key} | {name: getattr(row, name) for name in POINT}


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: engines in the order in which they would start, each with its points."""
    engines = [[point(chosen) for chosen in group] for group in plan.engines]
    return {"dry_run": True, "engines": engines, "skipped": [point(chosen) for chosen in plan.skipped],
            "reused_baselines": [found.id for found in plan.reused.values()],
            "expected_seconds": plan.seconds}  # fmt: skip


def plan_in_short(plan: Plan) -> str:
    """How much there is to do, and how long it may take."""
    if not plan.points:
        return f"nothing to measure: {len(plan.skipped)} point(s) are finished"
    reused = f", {len(plan.reused)} baseline(s) of earlier runs reused" if plan.reused else ""
    much = f"{len(plan.points)} point(s) on {len(plan.engines)} engine(s)"
    return f"{much}, {len(plan.skipped)} finished before and skipped{reused}; {_expected(plan.seconds)}"


def _expected(seconds: float | None) -> str:
    if seconds is None:
        return "how long it takes is not known: the folder holds no comparable point for some of them"
    if seconds < 90:
        return f"about {seconds:.0f} seconds, by comparable points of the folder"
    return f"about {seconds / 60:.0f} minutes, by comparable points of the folder"


def show_plan(plan: Plan) -> None:
    """A plan for people."""
    say(plan_in_short(plan), "bold")
    settings = distinguishing_settings([*plan.points, *plan.skipped])
    for number, group in enumerate(plan.engines, start=1):
        heading = f"engine {number}: {group[0].cfg.model.path} on {group[0].cfg.engine.name}"
        say("\n".join([heading, *(_point_line(chosen, settings) for chosen in group)]))
    if plan.skipped:
        say("\n".join(["finished before, and skipped:", *(_point_line(chosen, settings) for chosen in plan.skipped)]))


def _point_line(chosen: Planned, settings: dict[str, str]) -> str:
    row = planned(chosen.cfg, chosen.key)
    apart = f"  {settings[chosen.key]}" if settings[chosen.key] else ""
    return f"  {label(row):<40} {group_title(row)}{apart}  [{chosen.key}]"


def show_options(rows: list[Row], choices: list[Choice]) -> None:
    """Settings, then the choices of those that name an object of a registry."""
    for row in rows:
        about = ", ".join(part for part in (row.unit or row.type, row.allowed) if part)
        spec = f"; in a speculative_config: {row.spec_key}" if row.spec_key else ""
        head = Text.assemble((row.key, "bold"), f" = {row.default}", (f"  ({about}{spec})", "dim"))
        Console(soft_wrap=True).print(head)
        say(f"    {row.help}")
    for one in choices:
        default = f"  (threshold: {one.default} if none is given)" if one.default else ""
        Console(soft_wrap=True).print(Text.assemble((f"{one.key}={one.name}", "bold"), (default, "dim")))
        say(f"    {one.help}")


def show_checks(checks: list[Check]) -> None:
    """The doctor's lines. Names inside vLLM that are as they should be are counted; --json lists them."""
    places = [check for check in checks if ":" in check.name]
    right = [check for check in places if check.ok]
    counted = f"{len(right)} of {len(places)} that selfspec replaces are there as they should be (--json lists them)"
    for check in [check for check in checks if check not in right[1:]]:
        check = Check("names inside vLLM", True, counted) if check in right[:1] else check
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("    ", "")}[check.ok]
        Console(soft_wrap=True).print(Text.assemble((mark, style), f" {check.name:<22} {check.detail}"))


def show_facts(facts: dict[str, Any]) -> None:
    """Name and value pairs."""
    for name, value in facts.items():
        say(f"{name:<8} {value}")


def show_heads(reports: list[dict[str, Any]], seconds: float) -> None:
    """Fitted heads beside the lens of their layer; agreement is with the whole model's argmax on held-out text."""
    for head in reports:
        agreement = f"{head['agreement']:.1%}" if head.get("agreement") is not None else "not tested"
        name, vocab = head.get("head") or head["kind"], head.get("vocab", "full")
        name += f" {vocab}" if vocab != "full" else ""
        say(f"layer {head['layer']:<4} {name:<24} agreement {agreement:<11} {head.get('path', '(no fit)')}")
    say(f"{seconds:.1f} s in all", "bold")


def show_comparison(found: Comparison) -> None:
    """The table of heads, the best of them, and what could not be measured."""
    from selfspec_cli.report import heads

    Console(width=None if Console().is_terminal else 136).print(heads.table(found.rows))
    if found.best is not None:
        best = found.best
        say(f"best: {best.label} k={best.best_k}, predicted {best.predicted_speedup:.2f}x", "bold")
    for name, path in found.files.items():
        say(f"{name:<7} {path}")
    warn(found.failed)


def show_roc(rows: list[Any], choice: dict[str, Any], files: dict[str, str]) -> None:
    """Areas under the ROC curves, what each gate is expected to bring, and which one to choose."""
    say(f"{'':<6}{'head':<14}{'gate':<12}{'AUC':>6}{'at stake':>10}   best setting, and its expected speedup", "bold")
    for row in rows:
        areas = [f"{area:.3f}" if area is not None else "" for area in (row.auc, row.auc_at_stake)]
        limit = f"{row.threshold:.3g}" if row.threshold is not None else ""
        best = f"k={row.best_k:<3} {limit:<8} {row.expected_speedup:.2f}x"
        say(f"E={row.E:<4}{row.head:<14}{row.gate:<12}{areas[0]:>6}{areas[1]:>10}   {best}")
    say(f"use: {' '.join(choice['overrides'])}  expected {choice['expected_speedup']:.2f}x, without a gate "
        f"{choice['best_fixed_speedup']:.2f}x (k={choice['best_fixed_k']}), with an unbeatable one "
        f"{choice['oracle_speedup']:.2f}x", "bold")  # fmt: skip
    for name, path in files.items():
        say(f"{name}: {path}")


def show_fitted_weights(made: list[Fitted]) -> None:
    """What each file loses of a product's mean square, and how to use it."""
    for one in made:
        shares = ", ".join(f"{name} {share:.5f}" for name, share in one.medians.items())
        say(f"{one.kind}: {shares} of a product's mean square is lost (medians over the layers)")
        say(f"    draft_weights={one.kind} draft_weights_path={one.path}")
    say(f"{made[0].tokens} tokens, {made[-1].seconds:.0f} s", "bold")


def show_views(found: Views) -> None:
    """Acceptance of each view at each position, what a draft step reads, and the speedup that its bytes allow."""
    say(
        f"{'view':<34}{'T':>5}{'tokens':>8}{'cost':>7}{'predicted':>12}   acceptance at position 1 (95 %), 2, 3 ...",
        "bold",
    )
    for row in found.rows:
        spread = f" ({row.first_low:.3f} to {row.first_high:.3f})" if row.first_low is not None else ""
        rates = [f"{rate:.3f}" for rate in row.rates]
        tokens = f"{row.mean_accepted_len:.2f}" if row.mean_accepted_len is not None else ""
        cost = f"{row.cost:.2f}" if row.cost is not None else ""
        best = f"{row.predicted:.2f}x k={row.best_k}" if row.predicted is not None else ""
        shown = f"{row.label:<34}{row.temperature:>5g}{tokens:>8}{cost:>7}{best:>12}   "
        say(shown + ", ".join([f"{rates[0]}{spread}", *rates[1:]] if rates else ["nothing was drafted"]))
        if row.identical is not None and row.identical != row.outputs:
            warn([f"{row.label}: {row.identical} of {row.outputs} outputs are those of plain decoding"])
    say("predicted: from the bytes that a step reads at batch 1; not measured")
    for name, path in found.files.items():
        say(f"{name}: {path}")


def show_tuned(document: dict[str, Any], words: Sequence[str]) -> None:
    """What tuning measured last, what it chose, and how to use it. words: that name the choice."""
    for found in sorted(document["finalists"], key=lambda found: -found["speedup"]):
        limit = f"{found['threshold']:.3g}" if found["threshold"] is not None else ""
        pair = (found["speedup_low"], found["speedup_high"])
        spread = f"{found['speedup']:.2f}x" + (f" ({pair[0]:.2f} to {pair[1]:.2f})" if None not in pair else "")
        pace = f"plain decoding {found['plain_tok_s']:.0f} tok/s"
        say(f"E={found['E']} {found['head']} k={found['k']:<3} {found['gate']:<9} {limit:<7} {spread}, {pace}")
    say(f"{' '.join(document['overrides'])}: {document['speedup']:.2f}x plain decoding, the greatest of "
        f"{len(document['finalists'])} finalists, so measure it anew; found in {document['seconds']:.0f} s and "
        f"{document['trials']} trials", "bold")  # fmt: skip
    say(f"written to {document['file']}; use it with: {shlex.join(['selfspec', 'sweep', *words])}")


def rows_document(rows: list[Record]) -> list[dict[str, Any]]:
    """Rows as JSON: the columns of summary.csv, null where nothing was measured, and what other tables hold."""
    return [plain(row) for row in rows]
