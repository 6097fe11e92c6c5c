"""One backend's part of an answer: what it took there, and what it costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request

FEWEST = 4  # tokens of an answer from which the tokens of an event are learnt


@dataclass
class Attempt:
    """A request at a backend. before: tokens that other backends generated. first, last: monotonic seconds of its first
    and of its newest events. events: of its stream."""

    replica: Replica
    request: Request
    before: int = 0
    first: float | None = None
    last: float | None = None
    events: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.number = self.replica.begin(self.request)

    def came(self, events: int) -> None:
        """So many events have come and are on their way to the client."""
        self.last = time.monotonic()
        self.events += events
        if self.first is None:
            self.first = self.last
            self.replica.first_token(self.number, self.first - self.began)
            self.replica.breaker.succeeded()
            events -= 1
        if events:
            self.replica.came(self.number, events)

    def end(self, out: Outcome, counted: bool, alone: bool) -> None:
        """It has done with it, well or not: count the time of its machine and the money.

        counted: the tokens of `out` are those of the whole answer so far. alone: the whole answer came from here, as
        one text, and has ended.
        """
        tokens = None
        if alone and out.tokens and out.tokens > 1 and self.first is not None and self.last is not None:
            out.tpot = (self.last - self.first) / (out.tokens - 1)
            tokens = out.tokens if out.tokens >= FEWEST else None
        seconds = self.replica.end(self.number, tokens)
        out.machine_seconds = (out.machine_seconds or 0.0) + seconds
        own = self.replica.settings
        price = own.price_hour / 3600 * seconds
        if counted:  # what others generated before is part of the prompt here
            prompt, tokens = (out.prompt_tokens or 0) + self.before, (out.tokens or 0) - self.before
            price += (prompt * own.price_in + tokens * own.price_out) / 1e6
        if own.price_hour or own.price_in or own.price_out:
            out.cost = (out.cost or 0.0) + price
