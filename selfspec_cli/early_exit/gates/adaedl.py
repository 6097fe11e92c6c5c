"""1 - sqrt(gamma * H), a lower bound on the draft token's acceptance.

In [1 - sqrt(gamma log V), 1], so it may be negative. gamma weighs the entropy; AdaEDL (arXiv:2410.18351) uses 0.2.
"""

import math

from selfspec_cli.early_exit.gates.base import Gate

GAMMA = 0.2

GATE = Gate(
    name="adaedl",
    key="tau",
    direction="at_least",
    default=0.4,
    low=0.0,
    high=1.0,
    meaning="AdaEDL's lower bound on acceptance",
    help="Go on drafting while AdaEDL's bound on acceptance, 1 - sqrt(0.2 H), is at least `tau` (or `threshold`).",
    colour="#8a5fb0",
    statistic=lambda draft, previous: 1 - (GAMMA * draft.entropy.clamp_min(0)).sqrt(),  # rounding may leave H below 0
    device=f"1.0 - tl.sqrt({GAMMA} * tl.maximum(entropy, 0.0))",
    range=lambda vocab_size: (1 - math.sqrt(GAMMA * math.log(max(vocab_size, 2))), 1.0),
)
