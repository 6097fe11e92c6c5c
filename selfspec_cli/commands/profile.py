"""`selfspec profile`: where the time of an arm goes."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import guard
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command


@command(epilog="Examples: selfspec profile layer=3 k=4   ·   selfspec profile method=baseline workload.batch=8")
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
