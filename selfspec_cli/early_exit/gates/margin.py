"""p_(1) - p_(2), the gap between the two largest probabilities, in [0, 1].

The "breaking ties" margin of Scheffer et al. 2001; CALM (arXiv:2207.07061) uses it to exit early.
"""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="margin",
    key="tau",
    direction="at_least",
    default=0.3,
    low=0.0,
    high=1.0,
    meaning="the gap between the two largest probabilities",
    help="Go on drafting while the two largest probabilities are at least `tau` (or `threshold`) apart.",
    colour="#3a8f5c",
    statistic=lambda draft, previous: draft.confidence - draft.second,
    device="confidence - second",
)
