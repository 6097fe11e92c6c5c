"""The product of the largest probabilities so far, in [0, 1]: confidence that the whole draft stands.

EAGLE-2 (arXiv:2406.16858) ranks the branches of a draft by it.
"""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="survival",
    key="tau",
    direction="at_least",
    default=0.3,
    low=0.0,
    high=1.0,
    meaning="the product of the largest probabilities so far",
    help="Go on drafting while the product of the largest probabilities so far is at least `tau` (or `threshold`).",
    colour="#1d9aa8",
    statistic=lambda draft, previous: previous * draft.confidence,
    device="previous * confidence",
    cumulative=True,
)
