"""`selfspec gateway`: route requests to several servers; its settings, the server, and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from selfspec_cli.commands.screen import emit, guard, note, say
from selfspec_cli.commands.shared import Debug, DryRun, Json, command
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.engine.server import listening_error
from selfspec_cli.record.gateway_log import ALL

if TYPE_CHECKING:
    from selfspec_cli.gateway.settings import GatewaySettings

DEMO = "demo"


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
        route(words or [], as_json=as_json, dry_run=dry_run)


def route(words: Sequence[str], *, as_json: bool, dry_run: bool) -> None:
    """words: the name or file of a gateway, if any, and overrides KEY=VALUE."""
    from selfspec_cli.gateway import files

    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise ConfigError(f"one gateway at a time: {' '.join(named)}")
    if not named and not any(word.startswith("backends.") for word in words):
        raise ConfigError(
            f"name a gateway or a file; allowed: {', '.join(files.choices())}, NAME.yaml; "
            "selfspec gateway demo shows one on a CPU"
        )
    made = files.load(named[0] if named else None, [word for word in words if "=" in word])
    if dry_run:
        return emit({"dry_run": True, "gateway": asdict(made)}) if as_json else say(_text(made))
    if named == [DEMO]:
        return _demo(made, as_json)
    from selfspec_cli.gateway import server, workers

    serve = workers.serve if made.workers > 1 else server.serve
    if (error := listening_error(made.host, made.port)) is not None:  # before servers load their models
        raise ConfigError(
            f"port={made.port}: it cannot listen on {made.host}:{made.port} ({error.strerror})"
        ) from error
    serve(made, note, lambda: files.load(named[0] if named else None, [word for word in words if "=" in word]))


def _text(made: GatewaySettings) -> str:
    import yaml

    return str(yaml.safe_dump(asdict(made), sort_keys=False)).rstrip()


def _demo(made: GatewaySettings, as_json: bool) -> None:
    from selfspec_cli.gateway import demo

    try:
        found = demo.run(made, note)
    except demo.DemoFailed as error:
        note(f"failed: {error}")
        raise typer.Exit(1) from error
    emit(found) if as_json else _show(found)


ROUTES = {
    "backend": "route",
    "routing": "plain",
    "requests": "requests",
    "cache hits": "hits",
    "time to first token, ms": "ttft_ms",
    "predicted, ms": "expected_ttft_ms",
    "time per further token, ms": "tpot_ms",
    "predicted per token, ms": "expected_tpot_ms",
    "time to last token, ms": "e2e_ms",
    "tokens of answers": "tokens",
    "cost": "cost",
    "server time, s": "machine_s",
    "streams continued": "survived",
}
"""Headings, and the fields of `record.gateway_log.Route` under them."""

GAINS = ("model", "backend", "compared", "requests", "baseline requests", "gain", "95 % interval")
COMPARED = {"seconds": "time", "money": "cost"}
BASELINE = "baseline: requests drawn at random that went to the first backend, without drafts and cache"


def _show(found: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    title = "What requests took, by backend: times are medians, the rest are sums; prices are made up"
    table = Table(*ROUTES, title=title)
    for row in found["routes"]:
        shown = row | {"plain": "baseline" if row["plain"] else "by policy"}
        table.add_row(*(_cell(shown[field]) for field in ROUTES.values()))
    console.print(table)
    title = "What routing gained: baseline over routed, for one token of the answer; above 1 routing is better"
    table = Table(*GAINS, title=title)
    for gain in found["gains"]:
        interval = "" if gain["low"] is None else f"{gain['low']:.2f} to {gain['high']:.2f}"
        backend = "all together" if gain["route"] == ALL else gain["route"]
        table.add_row(
            gain["model"],
            backend,
            COMPARED[gain["of"]],
            str(gain["requests"]),
            str(gain["plain_requests"]),
            "" if gain["gain"] is None else f"{gain['gain']:.2f}",
            interval,
        )
    console.print(table)
    say(BASELINE)
    for name, value in found["checks"].items():
        say(f"{name}: {value}")
    say(f"log of every request: {found['log']}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
