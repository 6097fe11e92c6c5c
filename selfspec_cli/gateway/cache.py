"""Answers in one SQLite file, by a hash of everything that shapes them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec_cli.gateway import packed
from selfspec_cli.gateway.database import database
from selfspec_cli.gateway.request import Request

VERSION = 3
_NO_MATTER = ("stream", "stream_options", "user", "metadata", "store", "priority", "request_id")
"""Fields of a body that do not shape the answer."""
_TOOLS = ("tools", "tool_choice", "functions", "function_call")
_TABLES = """
CREATE TABLE IF NOT EXISTS answer (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, answer BLOB NOT NULL, used REAL NOT NULL,
    created REAL NOT NULL, bytes INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS answer_used ON answer (used);
CREATE INDEX IF NOT EXISTS answer_created ON answer (created);
CREATE TABLE IF NOT EXISTS size (entries INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
INSERT INTO size SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM size);
CREATE TRIGGER IF NOT EXISTS stored AFTER INSERT ON answer
    BEGIN UPDATE size SET entries = entries + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON answer
    BEGIN UPDATE size SET entries = entries - 1, bytes = bytes - old.bytes; END"""


def key(request: Request) -> bytes:
    """32 bytes that differ for any two requests that differ in what shapes the answer, or in the tenant."""
    body = {name: value for name, value in sorted(request.body.items()) if name not in _NO_MATTER}
    value = [request.tenant, request.model, request.endpoint, body]
    return hashlib.sha256(packed.dumps(value)).digest()


def specials(request: Request) -> set[str]:
    """Which of the kinds of `also_for` a request is."""
    called = any(one.get("tool_calls") or one.get("role") == "tool" for one in request.messages)
    found = {
        "tools": called or any(request.body.get(name) for name in _TOOLS),
        "images": not request.only_text,
        "sampled": not request.greedy,
    }
    return {name for name, is_one in found.items() if is_one}


class AnswerCache:
    """The file, which several processes may use. Its methods are called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError where the file is no cache's."""
        self._db = database(path, VERSION, _TABLES)

    def _one(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._db.execute(statement, values).fetchone()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def size(self) -> dict[str, int]:
        """Entries that are kept, and their bytes."""
        return dict(zip(("entries", "bytes"), self._one("SELECT entries, bytes FROM size"), strict=True))

    def lookup(self, wanted: bytes, now: float, oldest: float) -> tuple[str, dict[str, Any]] | None:
        """(what feedback and eviction name it by, the answer in OpenAI's form) of a request, by its key; None where
        there is none that was made at `oldest` or later."""
        found = self._one("SELECT id, answer FROM answer WHERE key = ? AND created >= ?", (wanted, oldest))
        if found is None:
            return None
        self._db.execute("UPDATE answer SET used = ? WHERE id = ?", (now, found[0]))
        return f"{found[0]:016x}", packed.loads(found[1])

    def store(self, wanted: bytes, tenant: str, answer: dict[str, Any], now: float, most: int, oldest: float) -> None:
        """Keep an answer. most: bytes of all of them; what was used longest ago goes first, and what is older."""
        raw = packed.dumps(answer)
        row = (secrets.randbits(62) + 1, wanted, tenant, raw, now, now, len(raw) + 200)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._remove("key = ? OR created < ?", (wanted, oldest))
            self._db.execute("INSERT INTO answer VALUES (?,?,?,?,?,?,?)", row)
            surplus, least = self.size()["bytes"] - most, []
            if surplus > 0:
                surplus += most // 100  # a hundredth more, so that not every store removes
                for number, size in self._db.execute("SELECT id, bytes FROM answer ORDER BY used"):
                    if surplus <= 0:
                        break
                    least.append((number,))
                    surplus -= size
                self._db.executemany("DELETE FROM answer WHERE id = ?", least)

    def _remove(self, which: str, values: Sequence[Any]) -> bool:
        """Remove these answers; whether there were any."""
        return self._db.execute(f"DELETE FROM answer WHERE {which}", values).rowcount > 0

    def evict(self, entry: str, tenant: str | None) -> bool:
        """Forget one answer; False where there is none by that id. tenant: whose it has to be; None: anybody's."""
        number = _number(entry)
        return number is not None and self._remove("id = ? AND tenant = coalesce(?, tenant)", (number, tenant))

    def has(self, entry: str, tenant: str) -> bool:
        """Whether there is an answer of this tenant by that id."""
        return self._one("SELECT 1 FROM answer WHERE id = ? AND tenant = ?", (_number(entry), tenant)) is not None


def _number(entry: str) -> int | None:
    """The number of an entry's id; None for what is no id."""
    fits = 0 < len(entry) <= 16 and all(letter in "0123456789abcdef" for letter in entry)
    return number if fits and (number := int(entry, 16)) < 1 << 63 else None
