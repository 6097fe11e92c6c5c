"""`selfspec sweep`: measure a grid."""

from typing import Annotated

import typer

from selfspec_cli.commands import cloud, configs
from selfspec_cli.commands.measuring import Ways, measure, nothing_typed
from selfspec_cli.commands.screen import ROWS_KEPT, SWEEP_GOES_ON, guard, warn
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, ReuseBaseline, command
from selfspec_cli.config.schema import ConfigError


@command(epilog="Examples: selfspec sweep gate=varH tau_v=4,5,6   ·   selfspec sweep experiment=m3_maxp layer=4")
def sweep(
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
    watch: Annotated[
        bool, typer.Option("--watch", help="Make the page again after points; a browser that shows it keeps up.")
    ] = False,
    execute: Annotated[
        bool,
        typer.Option("--execute", help="Of workload=humaneval: run the code that the model writes with its tests."),
    ] = False,
    reuse_baseline: ReuseBaseline = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Measure every point of comma lists and ranges, and the baseline; points that are finished are skipped."""
    with guard(as_json, debug, ROWS_KEPT if again else SWEEP_GOES_ON):
        if again and retry_failed:
            raise ConfigError("--again measures finished points too, --retry-failed only those that failed: give one")
        runs = configs.several(overrides, config=config)
        dry_run |= nothing_typed("sweep", overrides, config, "selfspec sweep gate=varH tau_v=4,5,6")
        if runs[0].launcher.kind == "sky" and not execute:
            given = {
                "--config": config,
                "--again": again,
                "--retry-failed": retry_failed,
                "--max-hours": max_hours,
                "--watch": watch,
                "--reuse-baseline": reuse_baseline,
            }
            options = [
                name if value is True else f"{name}={value}"
                for name, value in given.items()
                if value not in (None, False)
            ]
            return cloud.launch(runs[0], overrides or [], options, as_json=as_json, dry_run=dry_run)
        if execute:
            from selfspec_cli.stages import humaneval

            humaneval.check(runs)
            warn([humaneval.WARNING])
        ways = Ways(again, reuse_baseline, retry_failed, max_hours, watch, execute)
        measure("sweep", runs, ways, as_json=as_json, dry_run=dry_run, debug=debug)
