"""Varentropy: the variance of -log p under p, sum_i p_i (log p_i + H)^2 in squared nats, in [0, log(V - 1)^2 / 4 + 1].

It is 0 for a one-hot and for a uniform distribution alike, which is why it says little about confidence alone.
Kontoyiannis and Verdu, "Optimal lossless data compression", 2014, name the quantity; the bound is of Reeb and Wolf,
arXiv:1304.0036.
"""

import math

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="varH",
    key="tau_v",
    direction="at_most",
    default=5.0,
    low=0.0,
    high=math.inf,
    meaning="the varentropy in squared nats",
    help="Go on drafting while the variance of -log p under p (varentropy) is at most `tau_v`.",
    colour="#c23b4b",
    statistic=lambda draft, previous: draft.varentropy,
    device="varentropy",
    range=lambda vocab_size: (0.0, math.log(max(vocab_size, 2)) ** 2 / 4 + 1),
)
