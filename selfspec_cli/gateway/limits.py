"""Who may ask, and how much: keys by their SHA-256, and limits for each of them."""

import hashlib
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from selfspec_cli.gateway.database import database
from selfspec_cli.gateway.settings import KeySettings
from selfspec_cli.gateway.wire import GatewayError, unavailable

NOBODY = KeySettings("nobody")  # who asks without a key where none is needed
DAY = 86_400
BUCKETS = ("requests", "tokens")
VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS used (
    key TEXT PRIMARY KEY, requests REAL NOT NULL, tokens REAL NOT NULL, spent REAL NOT NULL, at REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS inside (
    key TEXT NOT NULL, process INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (key, process)) STRICT"""


class Meter:
    """What keys with limits have used. path: a file that all processes of a gateway share, and that a restart keeps.
    now: seconds of the wall clock. requests, tokens: left of a minute's worth, which comes back as time goes; below 0
    after a longer answer. spent: money of the day of `at`, in UTC. inside: requests in the gateway, by process."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Raises SettingsError for a file that cannot be used."""
        self.now = now
        self._db = database(path, VERSION, _TABLES)
        self._db.execute("PRAGMA synchronous=OFF")  # it is asked in the event loop, which must not wait for a disk
        for (process,) in self._db.execute("SELECT DISTINCT process FROM inside").fetchall():
            if process == os.getpid() or not Path(f"/proc/{process}").exists():
                self._db.execute("DELETE FROM inside WHERE process = ?", (process,))

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _changed(self, limits: KeySettings) -> Iterator[tuple[str, dict[str, float]]]:
        """(the key's digest, its row as of now), written back when the block ends without an error."""
        key, now = digest_of(limits), self.now()
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            found = self._db.execute("SELECT requests, tokens, spent, at FROM used WHERE key = ?", (key,)).fetchone()
            *buckets, spent, at = found or (math.inf, math.inf, 0.0, now)
            minutes = max(0.0, now - at) / 60
            used = {"spent": spent if at // DAY == now // DAY else 0.0}
            for what, left in zip(BUCKETS, buckets, strict=True):
                rate = getattr(limits, f"{what}_per_minute")
                used[what] = left if rate is None else min(float(rate), left + minutes * rate)
            yield key, used
            row = (key, used["requests"], used["tokens"], used["spent"], now)
            self._db.execute("INSERT OR REPLACE INTO used VALUES (?,?,?,?,?)", row)

    def enter(self, limits: KeySettings) -> None:
        """A request of this key comes in; raises GatewayError: a limit is reached (429), or cannot be read (503)."""
        if limited(limits):
            try:
                self._enter(limits)
            except sqlite3.Error as error:
                raise unavailable(f"the limits of {limits.name} cannot be read: {error}") from error

    def _enter(self, limits: KeySettings) -> None:
        who = limits.name
        with self._changed(limits) as (key, used):
            inside = self._db.execute("SELECT coalesce(sum(count), 0) FROM inside WHERE key = ?", (key,)).fetchone()[0]
            if limits.at_once is not None and inside >= limits.at_once:
                raise _too_much(f"{who}: {limits.at_once} requests at once are allowed", 1.0)
            for what in BUCKETS:
                rate = getattr(limits, f"{what}_per_minute")
                if rate is not None and used[what] < 1:
                    raise _too_much(f"{who}: {rate} {what} a minute are allowed", (1 - used[what]) * 60 / rate)
            if limits.money_per_day is not None and used["spent"] >= limits.money_per_day:
                seconds = DAY - self.now() % DAY
                raise _too_much(f"{who}: {limits.money_per_day:g} a day may be spent", seconds, "insufficient_quota")
            used["requests"] -= 1
            self._count(key, 1)

    def leave(self, limits: KeySettings, tokens: int, cost: float) -> None:
        """A request of this key has ended. tokens: that it took, prompt included; cost: in money. Raises sqlite3.Error
        where it cannot be written."""
        if limited(limits):
            with self._changed(limits) as (key, used):
                used["tokens"] -= tokens
                used["spent"] += cost
                self._count(key, -1)

    def _count(self, key: str, more: int) -> None:
        statement = "INSERT INTO inside VALUES (?,?,?) ON CONFLICT DO UPDATE SET count = count + excluded.count"
        self._db.execute(statement, (key, os.getpid(), more))


def limited(tenant: KeySettings) -> bool:
    """Whether a client has any limit."""
    limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.at_once, tenant.money_per_day)
    return any(one is not None for one in limits)


def check_model(tenant: KeySettings, model: str) -> None:
    """Raises GatewayError (403) for a model that this client may not ask for."""
    if tenant.models and model not in tenant.models:
        said, logged = f"{tenant.name} may ask for {', '.join(tenant.models)}", "a model that is not the key's"
        raise GatewayError(said, 403, "permission_error", param="model", logged=logged)


class Keys:
    """Who asks, by the key that is sent; without any configured key everybody may ask, without limits."""

    def __init__(self, settings: Sequence[KeySettings]) -> None:
        self.everybody = None if settings else KeySettings("everybody", admin=True)
        self.known = {digest_of(one): one for one in settings}

    def tenant(self, authorization: str) -> KeySettings:
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
    return settings.key.lower() if is_digest(settings.key) else _digest(os.environ[settings.key])


def is_digest(key: str) -> bool:
    """Whether this is a SHA-256, and no variable's name."""
    return re.fullmatch("[0-9a-fA-F]{64}", key) is not None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _too_much(message: str, seconds: float, code: str | None = None) -> GatewayError:
    headers = {"retry-after": str(max(1, round(seconds)))}
    return GatewayError(message, 429, "rate_limit_error", code=code, headers=headers)
