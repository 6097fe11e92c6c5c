"""The backend that has most of the prompt in its prefix cache, until it is saturated.

Saturated: more tokens wait there to be prefilled than it prefills in slo.ttft_ms, at the greatest rate that was seen
(llm-d's default rule). Then it is the next warmest that is not; where all are, the one with the fewest such tokens. A
session (header X-Session-ID, or `user` in the body) stays where its last request went, in the same way.

It loses to round robin where prompts share no beginning and answers are long: it does not balance what is generated.
"""

from collections import OrderedDict
from collections.abc import Sequence

from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request

SESSIONS = 10_000  # whose backends are remembered


class _Sticky(Chooser):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        choice = self._warmest(request, replicas)
        if request.session:
            session = (request.tenant, request.session)
            self.sessions[session] = choice.order[0].name
            self.sessions.move_to_end(session)
            if len(self.sessions) > SESSIONS:
                self.sessions.popitem(last=False)
        return choice

    def _warmest(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        home = self.sessions.get((request.tenant, request.session))

        def waiting(replica: Replica) -> float:
            return replica.ahead() + replica.uncached(request)

        def saturated(replica: Replica) -> bool:
            rate = replica.timing.prefill_rate
            if replica.ahead() == 0:
                return False
            return rate is None or waiting(replica) > rate * self.seconds  # no rate yet: one prompt at a time

        def cold(replica: Replica) -> tuple[float, ...]:
            load = (replica.ahead(), replica.running(), replica.begun)  # of idle ones, that with the fewest so far
            return (replica.name != home, -replica.cached_share(request), *load)

        warm = sorted(replicas, key=cold)
        free = [one for one in warm if not saturated(one)]
        if free:
            rest = [one for one in warm if one is not free[0]]
            known = "warm" if free[0] is warm[0] else "next_warm"
            reason = "session" if free[0].name == home else known if free[0].cached_share(request) else "cold"
            return Choice((free[0], *rest), reason)
        return Choice(tuple(sorted(replicas, key=waiting)), "saturated")


POLICY = Policy(
    "sticky_until_saturated",
    "the backend with most of the prompt in its prefix cache, until more tokens wait there than slo.ttft_ms allows",
    lambda options, slo: _Sticky(slo.ttft_ms / 1000),
    alone=True,
)
