"""`selfspec bench`: measure one arm, or an experiment."""

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import SweepOptions, measure, unless_nothing_typed
from selfspec_cli.commands.screen import ROWS_KEPT, Output
from selfspec_cli.commands.shared import Config, Overrides, ReuseBaseline, command


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
