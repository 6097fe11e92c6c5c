"""`selfspec verify`: is an arm lossless here."""

import os
from collections.abc import Collection, Iterable
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import RUN_FAILED, Output, say, show_facts
from selfspec_cli.commands.shared import Config, Overrides, command
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.stages import preflight


@command(
    epilog="Examples: selfspec verify layer=3 k=4   ·   selfspec verify model=llama3_8b engine=gpu --batch-invariant"
)
def verify(
    out: Output,
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
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant this fault, or all of them in turn: each must be named.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs on the same engines, each with a new seed.")] = 1,
) -> None:
    """Show that an arm is lossless here: compare greedy and sampled outputs with those of an engine without drafts."""
    from selfspec_cli.stages.verify import greedy, run
    from selfspec_cli.stages.verify.engines import EVERY, Wanted
    from selfspec_cli.stages.verify.verdict import KINDS, PASSING

    cfg = configs.one(overrides, config)
    named = tuple(name for name in only.split(",") if name)
    _check_names("--plant", [plant] if plant else [], [*KINDS, EVERY])
    _check_names("--cases", named, greedy.GROUPS)
    size = greedy.THOROUGH if thorough else greedy.QUICK
    wanted = Wanted(size, thorough, named, batch_invariant, near_tie, plant, repeat)
    run.check(cfg, wanted)
    (cfg,) = configs.runnable([cfg])
    if out.dry_run:
        return out.answer(document := run.plan(cfg, wanted), lambda: show_facts(document))
    preflight.check_device(cfg)
    if batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM reads it when it is imported, and so do its workers
    with on_engines(out, "verify", cfg, forked=True) as engines:
        document = run.run(cfg, wanted, **engines)
    out.answer(document, lambda: show(document))
    raise typer.Exit(0 if document["verdict"] in PASSING else RUN_FAILED)


def _check_names(option: str, names: Iterable[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ConfigError(closest(name, allowed, option))


def show(document: dict[str, Any]) -> None:
    """The verdict for people: a line a case, a line a way to sample, and the verdict last."""
    for name, proof in document["proof"].items():
        say(f"{'caught' if proof['caught'] else 'MISSED':<15} the fault {name} that this run planted itself")
    for row in document["cases"]:
        counted = f"{row['differ']} of {row['compared']} differ" if row["differ"] else f"{row['compared']} identical"
        drafted = f", {row['accepted']} of {row['drafted']} drafted tokens accepted" if row.get("drafted") else ""
        say(f"{row['verdict']:<15} {row['name']:<15} {counted}{drafted}" + _note(row))
    for row in document["sampling"]:
        say(f"{row['verdict']:<15} {row['name']}: {_figures(row)}" + _note(row))
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


def _figures(row: dict[str, Any]) -> str:
    if "p" not in row:
        return ""
    text = f"p = {row['p']:.3g}, distance {row['distance']:.3f} (plain from itself {row['distance_plain']:.3f})"
    if row["detectable_share"]:
        text += f", finds {row['detectable_share']:.0%} of {row['texts']} texts"
    exact = row.get("p_exact")
    return text if exact is None else f"{text}, against the exact distribution p = {exact:.3g}"


def _note(row: dict[str, Any]) -> str:
    return f"  ({row['note']})" if row.get("note") else ""
