"""What the gateway won: requests that it routed, beside those that went the plain way in the same time.

Which requests go the plain way is drawn at random, so the two sides are alike. Compared are seconds and money for one
token of the answer; the gain is the mean of the plain side over that of a route, with a 95 % interval by bootstrap
(`record.intervals`). A gain above 1 is a win.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.record.intervals import mean_ratio_interval

KEPT = 2000  # newest requests of a route
ALL = "all"  # routes together


@dataclass(frozen=True)
class Gain:
    """One route's. gain: plain over routed; low, high: its interval; None where one side has fewer than two requests,
    or a route cost nothing. of: seconds or money."""

    route: str
    of: str
    requests: int
    plain_requests: int
    gain: float | None
    low: float | None
    high: float | None


class Ledger:
    """Seconds and money a token, by route; the plain side is under None."""

    def __init__(self) -> None:
        self.seconds: dict[str | None, deque[float]] = {}
        self.money: dict[str | None, deque[float]] = {}

    def add(self, out: Outcome) -> None:
        """A request has ended."""
        self.add_row({"status": out.status, "plain": out.plain, "route": out.route, "tokens": out.tokens,
                      "e2e_ms": None if out.e2e is None else out.e2e * 1000, "cost": out.cost,
                      "cache": out.cache})  # fmt: skip

    def add_row(self, row: Mapping[str, Any]) -> None:
        """A line of the log."""
        tokens, route = row.get("tokens"), row.get("route")
        if row.get("status") != 200 or not tokens or route is None:
            return
        cost = 0.0 if row.get("cache") == "hit" else row.get("cost")
        for kept, value in ((self.seconds, row.get("e2e_ms")), (self.money, cost)):
            if value is None:
                continue
            scaled = value / tokens / (1000 if kept is self.seconds else 1)
            for key in [None] if row.get("plain") else [route, ALL]:
                kept.setdefault(key, deque(maxlen=KEPT)).append(scaled)

    def gains(self) -> list[Gain]:
        """Of every route, and of all together."""
        return [_gain(str(route), of, kept[route], kept.get(None, ()))
                for of, kept in (("seconds", self.seconds), ("money", self.money))
                for route in sorted(key for key in kept if key is not None)]  # fmt: skip


def _gain(route: str, of: str, ours: Sequence[float], plain: Sequence[float]) -> Gain:
    if min(len(ours), len(plain)) < 2 or sum(ours) == 0:
        return Gain(route, of, len(ours), len(plain), None, None, None)
    ratio = (sum(plain) / len(plain)) / (sum(ours) / len(ours))
    interval = mean_ratio_interval(plain, ours)
    low, high = interval if interval is not None else (None, None)
    return Gain(route, of, len(ours), len(plain), ratio, low, high)
