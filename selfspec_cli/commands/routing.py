"""`selfspec gateway`: its settings, the server, and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from selfspec_cli.commands.screen import emit, note, say
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.engine.server import listening_error
from selfspec_cli.gateway import files
from selfspec_cli.gateway.settings import GatewaySettings

DEMO = "demo"


def gateway(words: Sequence[str], *, as_json: bool, dry_run: bool) -> None:
    """words: the name or file of a gateway, if any, and overrides KEY=VALUE."""
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise ConfigError(f"one gateway at a time: {' '.join(named)}")
    if not named and not any(word.startswith("backends.") for word in words):
        raise ConfigError(f"name a gateway or a file; allowed: {', '.join(files.choices())}, NAME.yaml; "
                          "selfspec gateway demo shows one on a CPU")  # fmt: skip
    made = files.load(named[0] if named else None, [word for word in words if "=" in word])
    if dry_run:
        return emit({"dry_run": True, "gateway": asdict(made)}) if as_json else say(_text(made))
    if named == [DEMO]:
        return _demo(made, as_json)
    from selfspec_cli.gateway.server import serve

    if (error := listening_error(made.host, made.port)) is not None:  # before servers load their models
        raise ConfigError(
            f"port={made.port}: it cannot listen on {made.host}:{made.port} ({error.strerror})"
        ) from error
    serve(made, note)


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


def _show(found: dict[str, Any]) -> None:
    columns = ("route", "plain", "requests", "hits", "ttft_ms", "expected_ttft_ms", "tpot_ms", "expected_tpot_ms",
               "e2e_ms", "tokens", "cost", "machine_s", "survived")  # fmt: skip
    table = Table(*columns, title="medians by route; prices are made up")
    for row in found["routes"]:
        table.add_row(*(_cell(row[column]) for column in columns))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    table = Table("model", "route", "of", "requests", "plain requests", "gain", "95 % interval",
                  title="what it won: plain over routed, for one token of the answer; above 1 is a win")  # fmt: skip
    for gain in found["gains"]:
        interval = "" if gain["low"] is None else f"{gain['low']:.2f} to {gain['high']:.2f}"
        table.add_row(gain["model"], gain["route"], gain["of"], str(gain["requests"]), str(gain["plain_requests"]),
                      "" if gain["gain"] is None else f"{gain['gain']:.2f}", interval)  # fmt: skip
    console.print(table)
    for name, value in found["checks"].items():
        say(f"{name}: {value}")
    say(f"log of every request: {found['log']}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
