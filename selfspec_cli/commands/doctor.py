"""`selfspec doctor`: whether a run could work here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.screen import emit, guard, say
from selfspec_cli.commands.shared import Debug, Json, Overrides, command
from selfspec_cli.stages import doctor as doctor_stage
from selfspec_cli.terminal import kept_apart


@command(epilog="Example: selfspec doctor model=/models/llama3")
def doctor(overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say whether a run could work here: versions, device, patched vLLM names, compiler, model, settings."""
    with guard(as_json, debug):
        cfg = configs.one(overrides, None)
        with TemporaryDirectory(prefix="selfspec-") as scratch, kept_apart(Path(scratch) / "doctor.log"):
            checks = doctor_stage.run(cfg, _patches)
        fine = doctor_stage.could_run(checks)
        if as_json:
            emit({"ok": fine, "checks": [asdict(check) for check in checks]})
        else:
            screen.show_checks(checks)
            say("A run could work here." if fine else "A run could not work here.", "bold")
        raise typer.Exit(0 if fine else 1)


def _patches() -> list[tuple[str, bool, str]]:
    from selfspec_cli.vllm_plugin import compat

    return [(name, found, reason) for name, found, reason in compat.check()]
