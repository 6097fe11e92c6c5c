"""max_i p_i, in [1/V, 1]: the confidence of early exits (Kangaroo, arXiv:2404.18911)."""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="maxp",
    key="tau",
    direction="at_least",
    default=0.35,
    low=0.0,
    high=1.0,
    meaning="the largest draft probability",
    help="Go on drafting while the likeliest token has at least probability `tau`; tau=0 is always open.",
    colour="#2f6fb3",
    statistic=lambda draft, previous: draft.confidence,
    device="confidence",
)
