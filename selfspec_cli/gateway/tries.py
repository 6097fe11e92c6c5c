"""The backends that one request has tried, whose fault the failures were, and which backend comes next."""

from __future__ import annotations

from selfspec_cli.gateway.continuation import Way
from selfspec_cli.gateway.errors import GatewayError, unavailable
from selfspec_cli.gateway.policies.base import Choice
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.routing import Routing
from selfspec_cli.gateway.telemetry import Telemetry
from selfspec_cli.gateway.upstream import BackendFailed, Cause

ATTEMPTS = 3  # backends that are tried for one request, and as many for the rest of a stream


class Tries:
    """failures: in order; whether they are the backends' fault shows when another one answers. last: of the choice."""

    def __init__(self, routing: Routing, telemetry: Telemetry, request: Request, choice: Choice) -> None:
        self.routing, self.telemetry, self.request = routing, telemetry, request
        self.failures: list[tuple[Replica, BackendFailed]] = []
        order = choice.order[:ATTEMPTS]
        self.last = order[-1]
        self._order = iter(order)
        self._rest = iter(range(ATTEMPTS))

    def another(self, any_one: bool) -> Replica | None:
        """The next backend of the choice. any_one: after these, where all have failed, one whose breaker is open, which
        may do better."""
        replica = next(self._order, None)
        if replica is not None or not any_one or self.request.backend or len(self.failures) >= ATTEMPTS:
            return replica
        new = self._new(self.routing.up(self.request))
        return next((replica for replica in new if replica.has_room() and not replica.backoff()), None)

    def for_the_rest(self, way: Way | None) -> Replica:
        """The backend that sends the rest of a stream; raises GatewayError where nobody can. way: how it is asked."""
        dead = self.failures[-1][0]
        if way is None or next(self._rest, None) is None:
            raise self.broken()
        others = [
            replica
            for replica in self.routing.up(self.request)
            if replica.weights == dead.weights
            and replica is not dead
            and (replica.vllm or way is Way.again)
            and not replica.backoff()
        ]
        if not others:
            raise self.broken()
        new = self._new(others)
        sound = [replica for replica in new if replica.sound()]
        return self.routing.choose(self.request, sound or new or others).order[0]

    def _new(self, replicas: list[Replica]) -> list[Replica]:
        tried = [replica for replica, _ in self.failures]
        return [replica for replica in replicas if replica not in tried]

    def failed(self, replica: Replica, error: BackendFailed) -> None:
        """A backend failed. Its own fault is counted at once, and what it asks for is honoured."""
        self.failures.append((replica, error))
        if error.cause is Cause.backend:
            replica.breaker.failed()
        if error.retry_after:
            replica.backoff_until = max(replica.backoff_until, replica.now() + error.retry_after)

    def blame(self) -> None:
        """Another backend answered this request, so those that failed before are at fault, and not the request."""
        for replica, error in self.failures:
            if error.cause is Cause.shared:
                replica.breaker.failed()

    def nobody(self) -> GatewayError:
        """The error for a client where every backend failed before the first byte."""
        replica, error = self.failures[-1]
        said, logged = f"backend {replica.name}: {error}", f"backend {replica.name}: HTTP {error.status}"
        seconds = min((replica.retry_after for _, replica in self.failures if replica.retry_after), default=1.0)
        if error.status == 503:
            return unavailable(said, seconds, backend=replica.name, logged=logged)
        headers = {"retry-after": str(round(seconds))} if error.status == 429 else {}
        return GatewayError(said, error.status, "backend_error", backend=replica.name, headers=headers, logged=logged)

    def broken(self) -> GatewayError:
        """The error inside a stream that nobody can continue."""
        replica, error = self.failures[-1]
        self.telemetry.broken.labels(replica.name).inc()
        said = f"backend {replica.name} broke off: {error}; it could not be continued"
        return GatewayError(said, 502, "backend_error", backend=replica.name)
