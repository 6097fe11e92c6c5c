"""H = -sum_i p_i log p_i in nats, in [0, log V] (Shannon, 1948)."""

import math

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="entropy",
    key="threshold",
    direction="at_most",
    default=2.0,
    low=0.0,
    high=math.inf,
    meaning="the entropy in nats",
    help="Go on drafting while the entropy of the draft distribution is at most `threshold` (nats).",
    colour="#b9803a",
    statistic=lambda draft, previous: draft.entropy,
    device="entropy",
    range=lambda vocab_size: (0.0, math.log(max(vocab_size, 2))),
)
