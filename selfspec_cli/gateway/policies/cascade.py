"""The cheapest backend first; where it was not sure of its answer, the next dearer one is asked.

Sure: the geometric mean of the probabilities of the answer's tokens, as the backend gives them (`logprobs`), is at
least `sure`. The dearest backend's answer is always taken; where it fails, the last one that came. A stream cannot be
taken back, so streams, and requests with several answers or with tools, go to the dearest backend at once.

It loses to round robin where the cheap model is sure of wrong answers, or rarely sure: then it is asked for nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import EMBEDDINGS, Request


@dataclass(frozen=True)
class Options:
    sure: float = knob(
        0.7, help="least mean probability of the tokens of an answer that is taken", unit="fraction", low=0, high=1
    )


class _Cascade(Chooser):
    def __init__(self, sure: float) -> None:
        self.sure = sure

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        cheap_first = sorted(replicas, key=lambda one: one.price(request, one.predict(request)))
        if request.stream or request.endpoint == EMBEDDINGS or request.body.get("tools") or request.answers != 1:
            return Choice(tuple(reversed(cheap_first)), "dearest")
        return Choice(tuple(cheap_first), "cascade", sure=self.sure)


def sureness(answer: Any) -> float | None:
    """The geometric mean of the probabilities of an answer's tokens, 0 to 1; None where it does not tell them."""
    try:
        given = answer["choices"][0].get("logprobs") or {}
        logs = given.get("token_logprobs")
        if logs is None:
            logs = [one["logprob"] for one in given.get("content") or ()]
        logs = [float(one) for one in logs if one is not None]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    return math.exp(sum(logs) / len(logs)) if logs else None


POLICY = Policy(
    "cascade",
    "the cheapest backend first, and the next dearer one where it was not sure of its answer",
    lambda options, slo: _Cascade(options.sure),
    Options,
)
