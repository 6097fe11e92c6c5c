"""What a third party writes to add a gate: one object, named by an entry point in this package's metadata."""

from selfspec_cli.early_exit.gates import Gate

RATIO = Gate(
    name="ratio",
    key="threshold",
    direction="at_most",
    default=0.5,
    low=0.0,
    high=1.0,
    meaning="the second largest probability over the largest",
    help="Go on drafting while the second probability is at most `threshold` times the largest.",
    colour="#7f5539",
    statistic=lambda draft, previous: draft.second / draft.confidence,
    device="second / confidence",
)
