"""Who may ask, and how much: keys by their SHA-256, and limits for each of them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec_cli.gateway.errors import GatewayError
from selfspec_cli.gateway.settings import KeySettings

EVERYBODY = "everybody"


@dataclass
class Bucket:
    """A token bucket: `rate` a minute, at most a minute's worth at once. May be overdrawn by what is known later."""

    rate: float
    now: Callable[[], float] = time.monotonic
    level: float = 0.0
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level, self.at = self.rate, self.now()

    def wait(self) -> float:
        """Seconds until something may be taken; 0: now."""
        at = self.now()
        self.level = min(self.rate, self.level + (at - self.at) * self.rate / 60)
        self.at = at
        return 0.0 if self.level >= 1 else (1 - self.level) * 60 / self.rate

    def take(self, amount: float) -> None:
        """Take so much."""
        self.level -= amount


class Tenant:
    """One client's limits, and what it has in the gateway."""

    def __init__(self, settings: KeySettings, now: Callable[[], float] = time.monotonic) -> None:
        self.name, self.admin = settings.name, settings.admin
        self.most = settings.at_once
        self.inside = 0
        self.requests = Bucket(settings.requests_per_minute, now) if settings.requests_per_minute else None
        self.tokens = Bucket(settings.tokens_per_minute, now) if settings.tokens_per_minute else None

    def enter(self) -> None:
        """A request comes in; raises GatewayError (429) where a limit is reached."""
        if self.most is not None and self.inside >= self.most:
            raise _too_much(f"{self.name}: {self.most} requests at once are allowed", 1.0)
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None and (seconds := bucket.wait()) > 0:
                raise _too_much(f"{self.name}: {bucket.rate:g} {what} a minute are allowed", seconds)
        if self.requests is not None:
            self.requests.take(1)
        self.inside += 1

    def leave(self, tokens: int) -> None:
        """It is done, and took so many tokens."""
        self.inside -= 1
        if self.tokens is not None:
            self.tokens.take(tokens)


class Keys:
    """Who asks, by the key that is sent; without any configured key everybody may ask, without limits."""

    def __init__(self, settings: Sequence[KeySettings], now: Callable[[], float] = time.monotonic) -> None:
        self.everybody = None if settings else Tenant(KeySettings(name=EVERYBODY, admin=True), now)
        self.known: dict[str, Tenant] = {}
        for one in settings:
            self.known[digest_of(one)] = Tenant(one, now)

    def tenant(self, authorization: str) -> Tenant:
        """The client of a request; raises GatewayError (401) for a key that is missing or not known."""
        if self.everybody is not None:
            return self.everybody
        scheme, _, key = authorization.partition(" ")
        found = self.known.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            problem = "a wrong API key" if authorization else "no API key: send Authorization: Bearer KEY"
            raise GatewayError(problem, 401, "authentication_error", headers={"www-authenticate": "Bearer"})
        return found


def digest_of(settings: KeySettings) -> str:
    """The SHA-256 of a configured key."""
    return (settings.sha256 or _digest(os.environ[str(settings.env)])).lower()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _too_much(message: str, seconds: float) -> GatewayError:
    return GatewayError(message, 429, "rate_limit_error", headers={"retry-after": str(max(1, round(seconds)))})
