"""One backend after the other."""

from collections.abc import Sequence

from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request


class _RoundRobin(Chooser):
    count = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        first = self.count % len(replicas)
        self.count += 1
        return Choice((*replicas[first:], *replicas[:first]), "turn")


POLICY = Policy("round_robin", "one backend after the other, whatever is known of them", lambda *_: _RoundRobin())
