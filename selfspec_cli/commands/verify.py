"""`selfspec verify`: is an arm lossless here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import RUN_FAILED, emit, guard, say, show_facts
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.stages.verify.arm import Wanted


@command(
    epilog="Examples: selfspec verify layer=3 k=4   ·   selfspec verify model=llama3_8b engine=gpu --batch-invariant"
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
        _refuse_two_ways(overrides, probabilistic)
        cfg = configs.one(overrides, config)
        asked = _wanted(thorough, only, batch_invariant, near_tie, no_sampling, probabilistic, plant, repeat)
        document = _document(cfg, asked, dry_run=dry_run, debug=debug)
        emit(document) if as_json else show(document)
        raise typer.Exit(_exit_code(document))


def _wanted(
    thorough: bool,
    only: str,
    batch_invariant: bool,
    near_tie: float | None,
    no_sampling: bool,
    probabilistic: bool,
    plant: str | None,
    repeat: int,
) -> Wanted:
    """The options of the command line; raises ConfigError for a fault or a case that there is not."""
    from selfspec_cli.stages.verify import cases
    from selfspec_cli.stages.verify.arm import EVERY, Wanted
    from selfspec_cli.stages.verify.verdict import KINDS

    size = cases.THOROUGH if thorough else cases.QUICK
    named = tuple(name for name in only.split(",") if name)
    for option, names, allowed in (
        ("--plant", [plant] if plant else [], [*KINDS, EVERY]),
        ("--cases", named, cases.GROUPS),
    ):
        for name in names:
            if name not in allowed:
                raise ConfigError(closest(name, allowed, option))
    if no_sampling:
        size = replace(size, samples=0)
    return Wanted(size, thorough, named, batch_invariant, near_tie, plant, probabilistic, repeat)


def _refuse_two_ways(overrides: Sequence[str] | None, probabilistic: bool) -> None:
    """Refuse drafts that are to be drawn by an option and the likeliest tokens by a setting; raises ConfigError."""
    typed = [word for word in overrides or [] if word.replace(" ", "") == "draft_sample_method=greedy"]
    if typed and probabilistic:
        raise ConfigError(f"--probabilistic and {typed[0]}: give one of them")


def _document(cfg: RunConfig, asked: Wanted, *, dry_run: bool, debug: bool) -> dict[str, Any]:
    """Check, and run on real engines; the document."""
    from selfspec_cli.stages.verify import run

    run.check(cfg, asked)
    preflight.check(cfg)
    cfg = preflight.with_calibration(cfg)
    (cfg,) = preflight.for_this_machine([cfg])
    if dry_run:
        return run.plan(cfg, asked)
    preflight.check_device(cfg)
    if asked.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM reads it when it is imported, and so do its workers
    with tracked("verify", cfg), at_work("verify", cfg.results_dir, debug) as shown:
        return run.run(cfg, asked, open_engine=shown_starting(shown, forked=True), progress=shown)


def _exit_code(document: dict[str, Any]) -> int:
    """0: it passes (or nothing was run); 1: a fault, or not shown."""
    from selfspec_cli.stages.verify.verdict import PASSING

    return 0 if document.get("dry_run") or document["verdict"] in PASSING else RUN_FAILED


def show(document: dict[str, Any]) -> None:
    """The verdict for people: a line a case, a line a way to sample, and the verdict last."""
    if document.get("dry_run"):
        return show_facts(document)
    for name, proof in document["proof"].items():
        say(f"{'caught' if proof['caught'] else 'MISSED':<15} the fault {name} that this run planted itself")
    for row in document["cases"]:
        counted = f"{row['differ']} of {row['compared']} differ" if row["differ"] else f"{row['compared']} identical"
        drafted = f", {row['accepted']} of {row['drafted']} drafted tokens accepted" if row.get("drafted") else ""
        say(f"{row['verdict']:<15} {row['name']:<15} {counted}{drafted}" + _note(row))
    for row in document["sampling"]:
        figures = ""
        if "p" in row:
            figures = (
                f"p = {row['p']:.3g}, distance {row['distance']:.3f} (plain from itself {row['distance_plain']:.3f})"
            )
            figures += (
                f", finds {row['detectable_share']:.0%} of {row['texts']} texts" if row["detectable_share"] else ""
            )
            figures += (
                f", against the exact distribution p = {row['p_exact']:.3g}" if row.get("p_exact") is not None else ""
            )
        say(f"{row['verdict']:<15} {row['name']}: {figures}" + _note(row))
    for name in ("own_drafts", "head", "plain_repeats"):
        if document[name]:
            facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in document[name].items())
            say(f"{'':<15} {name.replace('_', ' ')}: {facts}")
    for kind, fault in document.get("faults", {}).items():
        say(f"{'named' if fault['named'] else 'MISSED':<15} the planted fault {kind}: {fault['reason']}")
    if document["runs"] > 1:
        say(", ".join(f"{count} of {document['runs']} runs: {name}" for name, count in document["verdicts"].items()))
    say(f"{document['verdict']}: {document['reason']}", "bold")
    say(f"{document['seconds']} s; {document['file']}")


def _note(row: dict[str, Any]) -> str:
    return f"  ({row['note']})" if row.get("note") else ""
