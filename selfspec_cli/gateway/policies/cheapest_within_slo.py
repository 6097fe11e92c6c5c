"""The cheapest of the backends that are expected to keep the limits of `slo`; where none does, the fastest.

It loses to round robin where the cheapest backend keeps the limits and is slower: then it is slower, for less money.
"""

from collections.abc import Sequence

from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.policies.least_time import by_time
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import SloSettings


class _Cheapest(Chooser):
    def __init__(self, slo: SloSettings) -> None:
        self.ttft, self.tpot = slo.ttft_ms / 1000, slo.tpot_ms / 1000

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        fastest = by_time(request, replicas)
        if fastest.reason != "least_time":
            return fastest
        fits = []
        for replica in fastest.order:
            expected = replica.predict(request)
            if expected is not None and expected.ttft <= self.ttft and expected.tpot <= self.tpot:
                fits.append((replica.price(request, expected), expected.e2e, replica))
        if not fits:
            return Choice(fastest.order, "slo_missed")
        _, _, best = min(fits, key=lambda one: one[:2])
        rest = [one for one in fastest.order if one is not best]
        return Choice((best, *rest), "cheapest")


POLICY = Policy(
    "cheapest_within_slo",
    "the cheapest backend that is expected to keep slo.ttft_ms and slo.tpot_ms; where none does, the fastest",
    lambda options, slo: _Cheapest(slo),
)
