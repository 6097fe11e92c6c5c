"""The backend at which the request adds least to the time of all requests: its own, and what it takes from others.

What a request takes is predicted from the requests there, the prompt's tokens that are not in the prefix cache, and
what a round of drafting costs and brings (`timing`). Of a vLLM server the first times are those of the requests that
warm it up. Another backend, of which nothing is known, is asked first, at most a few times at once, and so is one that
drafts: what drafts are worth in the text of clients, the requests that warm it up do not say. Later one request in
EXPLORE goes to the backend that was asked longest ago, because what changed there is seen in no other way; not while it
would slow down another one of its host.

A request that looked at its own time alone would fill the fast backend until it is as slow as the slow one, for all
that are there. So what it slows the others down is added: the requests there, times what one more costs a token, for
the half of their answers that they have before them on average.

Nobody is sent to a slower backend for the good of the others alone, since a few such requests are the whole p99: the
backend that is fastest when idle is left only for one where the request itself is expected to end sooner, by MARGIN of
the share by which that one is slower when idle: the load of a moment is expected to last, and often it does not.

Backends of one host may slow each other down: two servers on the cores of one machine. How much longer a step takes
while another one of the host is busy is measured. As long as it was not, or if it is, one of them at a time is used.

It loses to round robin where times cannot be predicted: when what makes a backend slow is neither its requests nor the
prompt (a neighbour on its machine), it follows what was true a few requests ago.
"""

from collections.abc import Sequence

from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.timing import FEW

MARGIN = 0.1
STAY = 0.8  # of the time at the backend of a host that is busy, from which another one of that host takes its place
EXPLORE = 500  # one request in so many goes to the backend that was asked longest ago


def by_time(request: Request, replicas: Sequence[Replica]) -> Choice:
    """The order by predicted time that the request adds; backends without a prediction come first, as long as no more
    requests than a prediction needs are on their way there."""
    known = {replica.name: replica.predict(request) for replica in replicas}
    fewest_first = sorted(replicas, key=lambda one: one.running())
    few = [one for one in fewest_first if len(one.flights) < FEW]
    new = [one for one in few if known[one.name] is None or (one.load.drafts and one.begun < FEW)]
    if new:
        return Choice(tuple(sorted(replicas, key=lambda one: one is not new[0])), "unknown")
    estimated = [one for one in replicas if known[one.name] is not None and not _outdone(one, replicas, request)]
    if not estimated:
        return Choice(tuple(fewest_first), "fewest")

    idle = {one.name: alone.e2e for one in estimated if (alone := one.predict(request, there=0.0))}
    fastest = min(estimated, key=lambda one: idle[one.name])

    def order(replica: Replica) -> tuple[bool, float]:
        own, best = known[replica.name], known[fastest.name]
        if own is None or best is None or replica not in estimated:
            return True, float("inf")
        slower = 1.0 - idle[fastest.name] / idle[replica.name] if idle[replica.name] else 0.0
        if own.e2e > best.e2e * (1.0 - MARGIN * slower):
            return replica is not fastest, own.e2e
        return False, own.e2e + replica.slows(request)

    return Choice(tuple(sorted(replicas, key=order)), "least_time")


def _outdone(replica: Replica, replicas: Sequence[Replica], request: Request) -> bool:
    """Whether another backend of its host, which it would slow down, gets all requests of that host: the one that would
    be faster with all of them, or the one that has them, as long as that is not much slower."""
    if not replica.slowed():
        return False
    host = [one for one in replicas if one is replica or one in replica.neighbours]
    together = sum(one.usual for one in host)
    busiest = max(host, key=lambda one: one.usual)

    def seconds(one: Replica) -> float:
        found = one.predict(request, there=together)
        return float("inf") if found is None else found.e2e * (STAY if one is busiest and together else 1.0)

    return min(host, key=seconds) is not replica


class _LeastTime(Chooser):
    def __init__(self) -> None:
        self.count = 0
        self.asked_at: dict[str, int] = {}

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        self.count += 1
        choice = by_time(request, replicas)
        if self.count % EXPLORE == 0 and choice.reason == "least_time":
            oldest = min(replicas, key=lambda replica: self.asked_at.get(replica.name, 0))
            if not (oldest.slowed() and oldest.beside()):
                choice = Choice(tuple(sorted(choice.order, key=lambda one: one is not oldest)), "explore")
        self.asked_at[choice.order[0].name] = self.count
        return choice


POLICY = Policy(
    "least_time",
    "the backend at which a request adds least time, its own and others', by load, prompt, prefix cache and drafts",
    lambda options, slo: _LeastTime(),
)
