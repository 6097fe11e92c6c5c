"""Five gates more: with those of selfspec and of selfspec_toy there are twelve statistics, more than eight."""

import math

from selfspec_cli.early_exit.gates import Gate


def gate(name, statistic, device, **more):
    return Gate(
        name=name,
        key="threshold",
        direction="at_most",
        default=1.0,
        low=-math.inf,
        high=math.inf,
        meaning=f"the {name}",
        help=f"Go on drafting while the {name} is at most `threshold`.",
        colour=f"#{len(name):02}{len(device):04}",
        statistic=statistic,
        device=device,
        range=lambda vocab_size: (-math.inf, math.inf),
        **more,
    )


DOUBT = gate(
    "doubt",
    lambda draft, previous: 0.5 * previous + (1 - draft.confidence),
    "0.5 * previous + (1.0 - confidence)",
    cumulative=True,
)
PEAK = gate("peak", lambda draft, previous: draft.logit, "logit")
ENERGY = gate("energy", lambda draft, previous: -draft.logsumexp, "-logsumexp")
SURPRISE = gate("surprise", lambda draft, previous: -draft.confidence.log(), "-tl.log(confidence)")
SPREAD = gate("spread", lambda draft, previous: draft.varentropy.sqrt(), "tl.sqrt(varentropy)")
