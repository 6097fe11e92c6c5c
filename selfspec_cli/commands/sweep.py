"""`selfspec sweep` and `selfspec bench`: measure a grid, or one arm."""

from typing import Annotated

import typer

from selfspec_cli.commands import cloud, configs
from selfspec_cli.commands.measuring import SweepOptions, measure, unless_nothing_typed
from selfspec_cli.commands.screen import ROWS_KEPT, SWEEP_GOES_ON, Output, warn
from selfspec_cli.commands.shared import Config, Overrides, ReuseBaseline, command
from selfspec_cli.config.schema import ConfigError


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
        return cloud.launch(runs[0], overrides or [], [*options.typed(), *(["--config"] if config else [])], out)
    measure("sweep", runs, options, out)


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
