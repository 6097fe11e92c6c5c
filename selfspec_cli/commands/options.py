"""`selfspec options` and `selfspec doctor`: every setting, and whether a run could work here."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import Output, emit, say
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.config import options
from selfspec_cli.config.options import Choice, Row
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.stages import preflight
from selfspec_cli.stages.preflight import Check
from selfspec_cli.terminal import kept_apart


@command(
    "options",
    epilog="Examples: selfspec options   ·   selfspec options gate   ·   selfspec options --json",
    settings=False,
    dry_run=False,
)
def show_options(
    out: Output,
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Show only what holds this word in its name or description.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Show the settings that are rarely needed, too.")] = False,
) -> None:
    """Settings: key, type, unit, range, default and meaning; every gate, head and kind of draft weights."""
    rows, choices = options.rows(word, rare=every or out.as_json), options.choices(word)
    if not rows and not choices:
        raise ConfigError(options.unknown(word))
    if out.as_json:
        return emit({"options": [asdict(row) for row in rows], "choices": [asdict(one) for one in choices]})
    _show_options(rows, choices)
    if not (word or every):
        say(f"{len(options.RARE)} more are rarely needed: selfspec options --all", "dim")


def _show_options(rows: list[Row], choices: list[Choice]) -> None:
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


@command(epilog="Example: selfspec doctor model=/models/llama3", dry_run=False)
def doctor(out: Output, overrides: Overrides = None) -> None:
    """Say whether a run could work here: versions, device, patched vLLM names, compiler, model, settings."""
    cfg = configs.one(overrides, None)
    with TemporaryDirectory(prefix="selfspec-") as scratch, kept_apart(Path(scratch) / "doctor.log"):
        checks = preflight.examine(cfg, _patches)
    fine = preflight.could_run(checks)
    if out.as_json:
        emit({"ok": fine, "checks": [asdict(check) for check in checks]})
    else:
        show_checks(checks)
        say(verdict(checks), "bold")
    raise typer.Exit(0 if fine else 1)


def verdict(checks: list[Check]) -> str:
    """The last sentence: whether a run could work, as far as that was checked."""
    if not preflight.could_run(checks):
        return "A run could not work here."
    without_model = any(check.name == "settings" and check.ok is None for check in checks)
    return "A run could work here" + ("; what depends on the model is not checked." if without_model else ".")


def _patches() -> list[tuple[str, bool, str]]:
    from selfspec_cli.vllm_plugin import patches

    return [*patches.check()]


def show_checks(checks: list[Check]) -> None:
    """The doctor's lines. Names inside vLLM that are as they should be are counted; --json lists them."""
    places = [check for check in checks if ":" in check.name]
    right = [check for check in places if check.ok]
    counted = f"{len(right)} of {len(places)} that selfspec replaces are there as they should be (--json lists them)"
    for check in [check for check in checks if check not in right[1:]]:
        check = Check("names inside vLLM", True, counted) if check in right[:1] else check
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("    ", "")}[check.ok]
        Console(soft_wrap=True).print(Text.assemble((mark, style), f" {check.name:<22} {check.detail}"))
