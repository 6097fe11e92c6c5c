"""Always the first backend that takes requests; the others are tried only when it fails."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request


@dataclass(frozen=True)
class Options:
    backend: str = knob("", help="name of the backend that gets all requests; empty: the first")


class _Fixed(Chooser):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        order = sorted(replicas, key=lambda replica: replica.name != self.backend)
        return Choice(tuple(order), "first" if not self.backend or order[0].name == self.backend else "next")


POLICY = Policy(
    "fixed",
    "the first backend, or the one named by the option backend; the others when it takes no requests",
    lambda options, slo: _Fixed(options.backend),
    Options,
)
