"""`selfspec doctor`: whether a run could work here."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console
from rich.text import Text

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import Output, emit, say
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.stages import doctor as doctor_stage
from selfspec_cli.stages.doctor import Check
from selfspec_cli.terminal import kept_apart


@command(epilog="Example: selfspec doctor model=/models/llama3", dry_run=False)
def doctor(out: Output, overrides: Overrides = None) -> None:
    """Say whether a run could work here: versions, device, patched vLLM names, compiler, model, settings."""
    cfg = configs.one(overrides, None)
    with TemporaryDirectory(prefix="selfspec-") as scratch, kept_apart(Path(scratch) / "doctor.log"):
        checks = doctor_stage.run(cfg, _patches)
    fine = doctor_stage.could_run(checks)
    if out.as_json:
        emit({"ok": fine, "checks": [asdict(check) for check in checks]})
    else:
        show(checks)
        say(verdict(checks), "bold")
    raise typer.Exit(0 if fine else 1)


def verdict(checks: list[Check]) -> str:
    """The last sentence: whether a run could work, as far as that was checked."""
    if not doctor_stage.could_run(checks):
        return "A run could not work here."
    without_model = any(check.name == "settings" and check.ok is None for check in checks)
    return "A run could work here" + ("; what depends on the model is not checked." if without_model else ".")


def _patches() -> list[tuple[str, bool, str]]:
    from selfspec_cli.vllm_plugin import compat

    return [*compat.check()]


def show(checks: list[Check]) -> None:
    """The doctor's lines. Names inside vLLM that are as they should be are counted; --json lists them."""
    places = [check for check in checks if ":" in check.name]
    right = [check for check in places if check.ok]
    counted = f"{len(right)} of {len(places)} that selfspec replaces are there as they should be (--json lists them)"
    for check in [check for check in checks if check not in right[1:]]:
        check = Check("names inside vLLM", True, counted) if check in right[:1] else check
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("    ", "")}[check.ok]
        Console(soft_wrap=True).print(Text.assemble((mark, style), f" {check.name:<22} {check.detail}"))
