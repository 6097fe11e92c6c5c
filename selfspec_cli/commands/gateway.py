"""`selfspec gateway`: route requests to several servers; its settings, the server, and the demo."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from selfspec_cli.commands import screen
from selfspec_cli.commands.screen import Output, note, say
from selfspec_cli.commands.shared import command
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
    out: Output,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE.yaml [KEY=VALUE]", help="One of conf/gateway/, or a file; docs/gateway.md."),
    ] = None,
) -> None:
    """Route requests to several servers: the best one for each, streams that survive, and the gain. See `demo`."""
    from selfspec_cli.gateway import files

    words = words or []
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise ConfigError(f"one gateway at a time: {' '.join(named)}")
    if not named and not any(word.startswith("backends.") for word in words):
        raise ConfigError(
            f"name a gateway or a file; allowed: {', '.join(files.choices())}, NAME.yaml; "
            "selfspec gateway demo shows one on a CPU"
        )

    def load() -> GatewaySettings:
        return files.load(named[0] if named else None, [word for word in words if "=" in word])

    settings = load()
    if out.dry_run:
        plan = asdict(settings)
        return out.answer(
            {"dry_run": True, "gateway": plan}, lambda: say(yaml.safe_dump(plan, sort_keys=False).rstrip())
        )
    if named == [DEMO]:
        return _demo(settings, out)
    from selfspec_cli.gateway import server, workers

    serve = workers.serve if settings.workers > 1 else server.serve
    if (error := listening_error(settings.host, settings.port)) is not None:  # before servers load their models
        raise ConfigError(
            f"port={settings.port}: it cannot listen on {settings.host}:{settings.port} ({error.strerror})"
        ) from error
    serve(settings, note, load)


def _demo(settings: GatewaySettings, out: Output) -> None:
    from selfspec_cli.gateway import demo

    try:
        found = demo.run(settings, note)
    except demo.DemoFailed as error:
        note(f"failed: {error}")
        raise typer.Exit(1) from error
    out.answer(found, lambda: _show(found))


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
"""Headings, and the fields of `gateway.demo.routes` under them."""


def _show(found: dict[str, Any]) -> None:
    say("What requests took, by backend: times are medians, the rest are sums; prices are made up", "bold")
    routes = [row | {"plain": "baseline" if row["plain"] else "by policy"} for row in found["routes"]]
    screen.table(tuple(ROUTES), [[_cell(row[field]) for field in ROUTES.values()] for row in routes], text=(0, 1))
    say("What routing gained: baseline over routed, for one token of the answer; above 1 routing is better", "bold")
    gains = [
        (
            gain["model"],
            "all together" if gain["route"] == ALL else gain["route"],
            {"seconds": "time", "money": "cost"}[gain["of"]],
            gain["requests"],
            gain["plain_requests"],
            "" if gain["gain"] is None else f"{gain['gain']:.2f}",
            "" if gain["low"] is None else f"{gain['low']:.2f} to {gain['high']:.2f}",
        )
        for gain in found["gains"]
    ]
    heads = ("model", "backend", "compared", "requests", "baseline requests", "gain", "95 % interval")
    screen.table(heads, gains, text=(0, 1, 2))
    say("baseline: requests drawn at random that went to the first backend, without drafts and cache")
    screen.show_files(found["checks"] | {"log of every request": found["log"]})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
