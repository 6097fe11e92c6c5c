"""One backend after the other."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec_cli.gateway.asked import Asked
from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica


class _RoundRobin(Chooser):
    def __init__(self) -> None:
        self.count = 0

    def choose(self, asked: Asked, replicas: Sequence[Replica]) -> Choice:
        first = self.count % len(replicas)
        self.count += 1
        return Choice((*replicas[first:], *replicas[:first]), "turn")


POLICY = Policy("round_robin", "one backend after the other, whatever is known of them", lambda *_: _RoundRobin())
