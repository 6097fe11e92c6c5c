"""What a user sees: one JSON line or a table, a plan, or an error that fits on a screen."""

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec_cli import load_patterns
from selfspec_cli.config.facts import engine_name
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit import view
from selfspec_cli.extras import remedy
from selfspec_cli.record.folder import RecordError
from selfspec_cli.record.tables import planned
from selfspec_cli.report.rows import group_title, label
from selfspec_cli.stages.plan import Plan, Planned, distinguishing_settings

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
SWEEP_GOES_ON = (
    "what was measured so far is kept; the same command measures the rest, and the baseline anew unless you add "
    "--reuse-baseline"
)
BEGINS_AGAIN = "the same command begins again"
FINDINGS_KEPT = f"what was found of arms that are complete is kept, but {BEGINS_AGAIN}"
ROWS_KEPT = f"rows measured so far are kept, but {BEGINS_AGAIN}"


@contextmanager
def guard(as_json: bool, debug: bool, then: str = BEGINS_AGAIN) -> Iterator[None]:
    """Exceptions into exit codes and one-screen messages. then: what is true after an interrupt, such as GOES_ON."""
    try:
        yield
    except typer.Exit:
        raise
    except ConfigError as error:
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


def _of_disk(error: OSError) -> str | None:
    """What to do about a folder of results or heads that cannot be written, or a full disk; None for other errors."""
    place = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}: {error.strerror}; free some space, or choose a folder on another disk (results_dir=)"
    if error.filename is None or not _is_written_to(Path(os.fsdecode(place))):
        return None  # such as a program that may not be run: the error names it
    return f"{place}: {error.strerror}; choose another folder (results_dir=, head_dir=), or make this one writable"


def _is_written_to(place: Path) -> bool:
    """Whether a place is one of this command's folders of results and heads, a file in one, or a folder above."""
    default = {name: getattr(RunConfig(), name) for name in ("results_dir", "head_dir")}
    typed = [value for name, _, value in (word.partition("=") for word in sys.argv) if name in default]
    for folder in map(Path, [*default.values(), *typed]):
        inside, above = (
            one.absolute().is_relative_to(other.absolute()) for one, other in ((place, folder), (folder, place))
        )
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


@dataclass(frozen=True)
class Output:
    """How a command answers. as_json: stdout ends with one document. dry_run: no engine starts. debug: see `OUTPUT`."""

    as_json: bool = False
    dry_run: bool = False
    debug: bool = False

    def answer(self, document: dict[str, Any], show: Callable[[], None]) -> None:
        """Print the document, or call `show`, which prints for people."""
        emit(document) if self.as_json else show()

    def plan(self, facts: dict[str, Any]) -> None:
        """Answer a dry run."""
        self.answer({"dry_run": True, **facts}, lambda: show_facts(facts))


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
    return {
        "dry_run": True,
        "engines": engines,
        "skipped": [point(chosen) for chosen in plan.skipped],
        "reused_baselines": [found.id for found in plan.reused.values()],
        "expected_seconds": plan.seconds,
    }


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
    much = f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    return f"about {much}, by comparable points of the folder"


def show_plan(plan: Plan) -> None:
    """A plan for people."""
    say(plan_in_short(plan), "bold")
    settings = distinguishing_settings([*plan.points, *plan.skipped])
    for number, group in enumerate(plan.engines, start=1):
        heading = f"engine {number}: {group[0].cfg.model.path} on {engine_name(group[0].cfg)}"
        say("\n".join([heading, *(_point_line(chosen, settings) for chosen in group)]))
    if plan.skipped:
        say("\n".join(["finished before, and skipped:", *(_point_line(chosen, settings) for chosen in plan.skipped)]))


def _point_line(chosen: Planned, settings: dict[str, str]) -> str:
    row = planned(chosen.cfg, chosen.key)
    apart = f"  {settings[chosen.key]}" if settings[chosen.key] else ""
    return f"  {label(row):<40} {group_title(row)}{apart}  [{chosen.key}]"


def show_facts(facts: dict[str, Any]) -> None:
    """Name and value pairs; what is None or empty is left out."""
    shown = {name.replace("_", " "): in_words(value) for name, value in facts.items() if name != "dry_run"}
    width = max((len(name) for name, text in shown.items() if text), default=0)
    for name, text in shown.items():
        if text:
            say(f"{name:<{width}}  {text}".replace("\n", "\n" + " " * (width + 2)))


def in_words(value: Any) -> str:
    """A value of a plan for people: a list as a, b; yes and no for a truth value; empty for None and for no elements.

    >>> in_words([{"k": 4, "drawn": False}, ("a", 1.5)])
    'k 4, drawn no; a, 1.5'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        words = [*filter(None, map(in_words, value))]
        return ("; " if any(", " in word for word in words) else ", ").join(words)
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], *, text: Iterable[int] = (0,), styles: Sequence[str] = ()
) -> None:
    """Print rows of cells; only a terminal folds the last column. text: columns that are no numbers."""
    made, columns = Table(header_style="bold", box=None, padding=(0, 1), pad_edge=False), set(text)
    for number, head in enumerate(heads):
        last = number == len(heads) - 1
        made.add_column(head, justify="left" if number in columns else "right", no_wrap=not last, overflow="fold")
    for number, row in enumerate(rows):
        made.add_row(*map(str, row), style=styles[number] if styles else "")
    Console(width=None if Console().is_terminal else 200).print(made)


def show_heads(reports: list[dict[str, Any]], seconds: float) -> None:
    """Fitted heads beside the lens of their layer; agreement is with the whole model's argmax on held-out text."""
    for head in reports:
        agreement = f"{head['agreement']:.1%}" if head.get("agreement") is not None else "not tested"
        name, vocab = head.get("head") or head["kind"], head.get("vocab", "full")
        name += f" {vocab}" if vocab != "full" else ""
        say(f"layer {head['layer']:<4} {name:<24} agreement {agreement:<11} {head.get('path', '(no fit)')}")
    say(f"{seconds:.1f} s in all", "bold")


def show_files(files: dict[str, str]) -> None:
    """Where what was made lies."""
    for name, path in files.items():
        say(f"{name}: {path}")
