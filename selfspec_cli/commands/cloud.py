"""A sweep on a spot machine: the command for SkyPilot, shown and run."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

import typer

from selfspec_cli.commands.screen import Output, say
from selfspec_cli.config.paths import data_dir
from selfspec_cli.config.schema import ConfigError, RunConfig

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
ELSEWHERE = ("launcher=", "launcher.kind=", "launcher.bucket=", "results_dir=")  # the job has its own
HANDED_ON = ("--retry-failed", "--max-hours")
"""Options of `selfspec sweep` that mean the same on the machine that is found, also after it was taken away."""


def command(cfg: RunConfig, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """What is given to SkyPilot for `selfspec sweep` with these words and options, such as "--max-hours=2". Raises
    ConfigError: there is no bucket for the results, or an option cannot be handed on."""
    for option in options:
        if option.partition("=")[0] not in HANDED_ON:
            raise ConfigError(
                f"launcher=sky: {option} cannot be handed on, because a job is begun again on another machine; "
                f"allowed: settings, {', '.join(HANDED_ON)}"
            )
    bucket = cfg.launcher.bucket
    if bucket is None:
        raise ConfigError(
            "launcher=sky keeps results in a bucket, because a spot machine can be taken away: name one of yours, or a "
            "name that nobody has: launcher.bucket=NAME"
        )
    kept = [word for word in words if not word.startswith(ELSEWHERE)]
    given = [f"SELFSPEC_BUCKET={bucket}", f"SELFSPEC_WORDS={shlex.join([*kept, *options])}"]
    made = ["sky", "jobs", "launch", str(data_dir() / "infra" / "selfspec.yaml")]
    for name in given:
        made += ["--env", name]
    for name in SECRETS:
        made += ["--secret", name if os.environ.get(name) else f"{name}="]
    return made


def launch(cfg: RunConfig, words: Sequence[str], options: Sequence[str], out: Output) -> None:
    """Show the command, and unless `dry_run` run it; its exit code is this command's. Raises ConfigError: SkyPilot is
    not installed."""
    made = command(cfg, words, options)
    out.answer({"command": made}, lambda: say(shlex.join(made)))
    if out.dry_run:
        return
    if shutil.which("sky") is None:
        raise ConfigError(
            "launcher=sky: there is no command sky; SkyPilot needs an environment of its own, because it wants older "
            "packages than vLLM: pipx install 'skypilot[aws]' (or gcp, azure, kubernetes)"
        )
    raise typer.Exit(subprocess.run(made, check=False).returncode)
