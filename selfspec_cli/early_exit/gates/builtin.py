"""The gates of this package.

adaedl    1 - sqrt(gamma * H), a lower bound on the draft token's acceptance, in [1 - sqrt(gamma log V), 1], so it may
          be negative. gamma weighs the entropy; AdaEDL (arXiv:2410.18351) uses 0.2.
auto      no threshold: measured times and acceptance decide how much is drafted, before each step and in it (rule.py)
entropy   H = -sum_i p_i log p_i in nats, in [0, log V] (Shannon, 1948)
margin    p_(1) - p_(2), the gap between the two largest probabilities, in [0, 1]: the "breaking ties" margin of
          Scheffer et al. 2001; CALM (arXiv:2207.07061) uses it to exit early
maxp      max_i p_i, in [1/V, 1]: the confidence of early exits (Kangaroo, arXiv:2404.18911)
none      every draft has k tokens
survival  the product of the largest probabilities so far, in [0, 1]: confidence that the whole draft stands. EAGLE-2
          (arXiv:2406.16858) ranks the branches of a draft by it.
varH      varentropy: the variance of -log p under p, sum_i p_i (log p_i + H)^2 in squared nats, in
          [0, log(V - 1)^2 / 4 + 1]. It is 0 for a one-hot and for a uniform distribution alike, which is why it says
          little about confidence alone. Kontoyiannis and Verdu, "Optimal lossless data compression", 2014, name the
          quantity; the bound is of Reeb and Wolf, arXiv:1304.0036."""

import math

from selfspec_cli.early_exit.gates.base import Gate

GAMMA = 0.2

ADAEDL = Gate(
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
AUTO = Gate(
    name="auto",
    meaning="a constant",
    help="Draft up to k tokens where measured times and acceptance say that it pays, and stop where it no longer does.",
    colour="#b4532a",
)
ENTROPY = Gate(
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
MARGIN = Gate(
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
MAXP = Gate(
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
NONE = Gate(name="none", meaning="a constant", help="Always draft k tokens.", colour="#a7b1bc")
SURVIVAL = Gate(
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
VARH = Gate(
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
