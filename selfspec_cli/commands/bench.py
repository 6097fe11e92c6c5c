"""`selfspec bench`: measure one arm, or an experiment."""

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import Ways, measure, nothing_typed
from selfspec_cli.commands.screen import ROWS_KEPT, guard
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, ReuseBaseline, command


@command(epilog="Examples: selfspec bench gate=maxp tau=0.35 layer=4 k=5   ·   selfspec bench experiment=gpu_8b")
def bench(
    overrides: Overrides = None,
    config: Config = None,
    reuse_baseline: ReuseBaseline = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Measure one arm, or all of one experiment, and the baseline that each is compared with; always afresh."""
    with guard(as_json, debug, f"{ROWS_KEPT}; selfspec sweep with the same words measures only the rest"):
        whole = any(override.startswith("experiment=") for override in overrides or [])
        runs = configs.several(overrides, sweep=whole, config=config)
        dry_run |= nothing_typed("bench", overrides, config, "selfspec bench gate=maxp tau=0.35 layer=4 k=5")
        ways = Ways(again=True, reuse_baseline=reuse_baseline)
        measure("bench", runs, ways, as_json=as_json, dry_run=dry_run, debug=debug)
