"""`selfspec gateway`: route requests to several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec_cli.commands.screen import guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, command


@command(
    epilog="Examples: selfspec gateway demo   ·   selfspec gateway two_servers policy=round_robin port=8080   ·   "
    "selfspec gateway mine.yaml",
    settings=False,
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
    """Route requests to several servers: the best one for each, streams that survive, and the gain. See `demo`."""
    with guard(as_json, debug):
        from selfspec_cli.commands import routing

        routing.gateway(words or [], as_json=as_json, dry_run=dry_run)
