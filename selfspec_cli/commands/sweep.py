"""`selfspec sweep` and `selfspec bench`: measure a grid, here or on a spot machine by SkyPilot, or one arm."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import SweepOptions, measure, unless_nothing_typed
from selfspec_cli.commands.screen import ROWS_KEPT, SWEEP_GOES_ON, Output, say, warn
from selfspec_cli.commands.shared import Config, Overrides, ReuseBaseline, command
from selfspec_cli.config.paths import data_dir
from selfspec_cli.config.schema import ConfigError, RunConfig

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
ELSEWHERE = ("launcher=", "launcher.kind=", "launcher.bucket=", "results_dir=")  # the job has its own
HANDED_ON = ("--retry-failed", "--max-hours")
"""Options of `selfspec sweep` that mean the same on the machine that is found, also after it was taken away."""


@command(
    epilog="Examples: selfspec sweep gate=varH tau_v=4,5,6   ·   selfspec sweep experiment=m3_maxp layer=4",
    then=lambda words: ROWS_KEPT if words["again"] else SWEEP_GOES_ON,
)
def sweep(
    out: Output,
    overrides: Overrides = None,
    config: Config = None,
    again: Annotated[bool, typer.Option("--again", help="Measure finished points once more.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Only the points that an earlier command could not measure.")
    ] = False,
    max_hours: Annotated[
        float | None,
        typer.Option("--max-hours", min=0, help="Begin no point later than that; the same command goes on."),
    ] = None,
    execute: Annotated[
        bool,
        typer.Option("--execute", help="Of workload=humaneval: run the code that the model writes with its tests."),
    ] = False,
    reuse_baseline: ReuseBaseline = False,
) -> None:
    """Measure every point of comma lists and ranges, and the baseline; points that are finished are skipped."""
    if again and retry_failed:
        raise ConfigError("--again measures finished points too, --retry-failed only those that failed: give one")
    runs = configs.several(overrides, config=config)
    out = unless_nothing_typed(out, "sweep", overrides, config, "selfspec sweep gate=varH tau_v=4,5,6")
    if execute:
        from selfspec_cli.stages import humaneval

        humaneval.check(runs)
        warn([humaneval.WARNING])
    options = SweepOptions(again, reuse_baseline, retry_failed, max_hours, execute)
    if runs[0].launcher.kind == "sky":
        return _launch_on_sky(runs[0], overrides or [], [*options.typed(), *(["--config"] if config else [])], out)
    measure("sweep", runs, options, out)


def sky_command(cfg: RunConfig, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """SkyPilot's command for `selfspec sweep`. Raises ConfigError: no bucket, or an option that cannot be handed on."""
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


def _launch_on_sky(cfg: RunConfig, words: Sequence[str], options: Sequence[str], out: Output) -> None:
    """Show SkyPilot's command, and unless `dry_run` run it; its exit code is this command's."""
    made = sky_command(cfg, words, options)
    out.answer({"command": made}, lambda: say(shlex.join(made)))
    if out.dry_run:
        return
    if shutil.which("sky") is None:
        raise ConfigError(
            "launcher=sky: there is no command sky; SkyPilot needs an environment of its own, because it wants older "
            "packages than vLLM: pipx install 'skypilot[aws]' (or gcp, azure, kubernetes)"
        )
    raise typer.Exit(subprocess.run(made, check=False).returncode)


@command(
    epilog="Examples: selfspec bench gate=maxp tau=0.35 layer=4 k=5   ·   selfspec bench experiment=gpu_8b",
    then=f"{ROWS_KEPT}; selfspec sweep with the same words measures only the rest",
)
def bench(
    out: Output, overrides: Overrides = None, config: Config = None, reuse_baseline: ReuseBaseline = False
) -> None:
    """Measure one arm, or all of one experiment, and the baseline that each is compared with; always afresh."""
    whole = any(override.startswith("experiment=") for override in overrides or [])
    runs = configs.several(overrides, sweep=whole, config=config)
    out = unless_nothing_typed(out, "bench", overrides, config, "selfspec bench gate=maxp tau=0.35 layer=4 k=5")
    measure("bench", runs, SweepOptions(again=True, reuse_baseline=reuse_baseline), out)
