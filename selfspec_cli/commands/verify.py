"""`selfspec verify`: is an arm lossless here."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import emit, guard
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command


@command(
    epilog="Examples: selfspec verify layer=3 k=4   ·   selfspec verify model=llama3_8b engine=h100 --batch-invariant"
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
