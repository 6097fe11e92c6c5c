"""Who may ask, and how much: keys by their SHA-256, and limits for each of them."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec_cli.gateway.errors import GatewayError
from selfspec_cli.gateway.settings import KeySettings

EVERYBODY = "everybody"
DAY = 86_400


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
    """One client's limits, and what it has in the gateway. spent: money of `day`, which is counted in UTC."""

    def __init__(self, settings: KeySettings, now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.name, self.admin = settings, settings.name, settings.admin
        self.most = settings.at_once
        self.inside = 0
        self.spent, self.day = 0.0, 0
        self.requests = Bucket(settings.requests_per_minute, now) if settings.requests_per_minute else None
        self.tokens = Bucket(settings.tokens_per_minute, now) if settings.tokens_per_minute else None

    def enter(self) -> None:
        """A request comes in; raises GatewayError (429) where a limit is reached."""
        if self.most is not None and self.inside >= self.most:
            raise _too_much(f"{self.name}: {self.most} requests at once are allowed", 1.0)
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None and (seconds := bucket.wait()) > 0:
                raise _too_much(f"{self.name}: {bucket.rate:g} {what} a minute are allowed", seconds)
        budget, today = self.settings.money_per_day, int(time.time() // DAY)
        if budget is not None and self.day == today and self.spent >= budget:
            error = _too_much(f"{self.name}: {budget:g} a day may be spent", DAY - time.time() % DAY)
            error.code = "insufficient_quota"
            raise error
        if self.requests is not None:
            self.requests.take(1)
        self.inside += 1

    def leave(self, tokens: int, cost: float) -> None:
        """It is done, and took so many tokens and so much money."""
        self.inside -= 1
        if self.tokens is not None:
            self.tokens.take(tokens)
        today = int(time.time() // DAY)
        self.spent, self.day = cost + (self.spent if self.day == today else 0.0), today

    def check_model(self, model: str) -> None:
        """Raises GatewayError (403) for a model that this client may not ask for."""
        if self.settings.models and model not in self.settings.models:
            raise GatewayError(
                f"{self.name} may ask for {', '.join(self.settings.models)}",
                403,
                "permission_error",
                param="model",
                logged="a model that the key may not ask for",
            )


class Keys:
    """Who asks, by the key that is sent; without any configured key everybody may ask, without limits."""

    def __init__(
        self,
        settings: Sequence[KeySettings],
        now: Callable[[], float] = time.monotonic,
        before: Keys | None = None,
    ) -> None:
        """before: of the settings until now; a key that has not changed keeps what was counted of it."""
        self.everybody = None if settings else Tenant(KeySettings(name=EVERYBODY, admin=True), now)
        self.known: dict[str, Tenant] = {}
        for one in settings:
            known = None if before is None else before.known.get(digest_of(one))
            self.known[digest_of(one)] = known if known and known.settings == one else Tenant(one, now)

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
    return settings.key.lower() if is_digest(settings.key) else _digest(os.environ[settings.key])


def is_digest(key: str) -> bool:
    """Whether this is a SHA-256, and no variable's name."""
    return re.fullmatch("[0-9a-fA-F]{64}", key) is not None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _too_much(message: str, seconds: float) -> GatewayError:
    return GatewayError(message, 429, "rate_limit_error", headers={"retry-after": str(max(1, round(seconds)))})
