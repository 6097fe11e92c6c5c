"""Entries, verdicts and promises in one SQLite file, which a kill at any moment leaves whole.

Write-ahead logging: a transaction is in the file or it is not. `synchronous` is NORMAL, so a killed process loses
nothing that it committed, and a power cut at most the last transactions. One process opens the file at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway.cache.judgement import Verdict
from selfspec_cli.gateway.cache.promise import Promise

VERSION = 1
VERDICTS = 2000  # kept of each tenant
_TABLES = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, scope BLOB NOT NULL, question TEXT,
    answer BLOB NOT NULL, vector BLOB, created REAL NOT NULL, used REAL NOT NULL,
    expires REAL NOT NULL, bytes INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS entry_used ON entry (used);
CREATE INDEX IF NOT EXISTS entry_expires ON entry (expires);
CREATE TABLE IF NOT EXISTS verdict (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, entry INTEGER NOT NULL, features BLOB NOT NULL, vector BLOB NOT NULL,
    words TEXT NOT NULL, right INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS verdict_tenant ON verdict (tenant, id);
CREATE TABLE IF NOT EXISTS promise (
    tenant TEXT PRIMARY KEY, delta REAL NOT NULL, alpha REAL NOT NULL, log_e REAL NOT NULL, wrong REAL NOT NULL,
    right REAL NOT NULL, audits INTEGER NOT NULL, wrong_audits INTEGER NOT NULL
) STRICT;
"""


@dataclass(frozen=True)
class Entry:
    """A row of the table of entries.

    Attributes:
        id: a random number of 63 bits, which is what clients name an entry by.
        key, scope: of the request (`request.py`).
        question: what is compared by meaning; None for an entry that is found exactly only.
        answer: the document in OpenAI's form, as JSON.
        vector: of the question, float16 of shape (384,), if the entry may be found by meaning; else None.
        created, used, expires: seconds since the epoch.
    """

    id: int
    key: bytes
    tenant: str
    scope: bytes
    question: str | None
    answer: bytes
    vector: np.ndarray | None
    created: float
    used: float
    expires: float

    @property
    def bytes(self) -> int:
        """About what the entry takes, in the file and in the index."""
        return (
            len(self.answer)
            + len(self.question or "")
            + 200
            + (3 * self.vector.nbytes if self.vector is not None else 0)
        )


class Storage:
    """The file. Not for two threads at once.

    Attributes:
        entries, bytes: how many there are, and their size.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise SettingsError(
                    f"{path} is a cache of version {version}, this release reads {VERSION}: name another file"
                )
            self._db.execute("BEGIN IMMEDIATE")  # takes the lock, so that a second process fails here and not later
            for statement in _TABLES.split(";\n"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={VERSION}")
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._db.close()
            raise SettingsError(
                f"{path} cannot be opened ({error}); one process at a time uses a cache's file"
            ) from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise SettingsError(f"{path} is no cache's file: {error}") from error
        self.entries, self.bytes = self._db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM entry").fetchone()

    def close(self) -> None:
        self._db.close()

    def by_key(self, key: bytes, now: float) -> tuple[int, bytes] | None:
        """(id, answer) of the same request, if there is one and its time is not up."""
        return self._db.execute("SELECT id, answer FROM entry WHERE key = ? AND expires > ?", (key, now)).fetchone()

    def questions(self, ids: list[int], now: float) -> dict[int, str]:
        """Of these entries those that live, and their questions."""
        marks = ",".join("?" * len(ids))
        rows = self._db.execute(f"SELECT id, question FROM entry WHERE id IN ({marks}) AND expires > ?", (*ids, now))
        return dict(rows.fetchall())

    def answer(self, entry: int) -> bytes | None:
        row = self._db.execute("SELECT answer FROM entry WHERE id = ?", (entry,)).fetchone()
        return None if row is None else row[0]

    def place(self, entry: int) -> tuple[str, bytes] | None:
        """(tenant, scope) of an entry."""
        return self._db.execute("SELECT tenant, scope FROM entry WHERE id = ?", (entry,)).fetchone()

    def used(self, entry: int, now: float) -> None:
        self._db.execute("UPDATE entry SET used = ? WHERE id = ?", (now, entry))

    def put(self, entry: Entry) -> int | None:
        """Add an entry in place of an earlier one of the same key, whose id is returned."""
        vector = None if entry.vector is None else entry.vector.astype(np.float16).tobytes()
        self._db.execute("BEGIN")
        old = self._db.execute("SELECT id, bytes FROM entry WHERE key = ?", (entry.key,)).fetchone()
        if old is not None:
            self._db.execute("DELETE FROM entry WHERE id = ?", (old[0],))
        values = (entry.id, entry.key, entry.tenant, entry.scope, entry.question, entry.answer, vector)
        times = (entry.created, entry.used, entry.expires, entry.bytes)
        self._db.execute(f"INSERT INTO entry VALUES ({','.join('?' * 11)})", (*values, *times))
        self._db.execute("COMMIT")
        self.entries += old is None
        self.bytes += entry.bytes - (old[1] if old else 0)
        return old[0] if old else None

    def find_by_meaning(self, entry: int, vector: np.ndarray) -> bool:
        """Let an entry be found by its question's vector from now on; False if it is gone."""
        changed = self._db.execute(
            "UPDATE entry SET vector = ? WHERE id = ?", (vector.astype(np.float16).tobytes(), entry)
        )
        return changed.rowcount == 1

    def vectors(self) -> Iterator[tuple[int, bytes, np.ndarray]]:
        """(id, scope, vector) of every entry that is found by meaning, by scope."""
        for number, scope, vector in self._db.execute(
            "SELECT id, scope, vector FROM entry WHERE vector IS NOT NULL ORDER BY scope"
        ):
            yield number, scope, np.frombuffer(vector, dtype=np.float16)

    def remove(self, entry: int) -> None:
        row = self._db.execute("DELETE FROM entry WHERE id = ? RETURNING bytes", (entry,)).fetchall()
        if row:
            self.entries -= 1
            self.bytes -= row[0][0]

    def surplus(self, now: float, entries: int, size: int) -> list[tuple[int, bytes]]:
        """(id, scope) of entries to be removed: those whose time is up, and the least recently used ones as
        long as there are more than `entries` or more than `size` bytes; then a hundredth more, so that not every store
        removes.
        """
        rows = self._db.execute("SELECT id, scope FROM entry WHERE expires <= ?", (now,)).fetchall()
        if self.entries > entries or self.bytes > size:
            room_entries, room_bytes = entries - entries // 100, size - size // 100
            left, left_bytes = self.entries, self.bytes
            for number, scope, its in self._db.execute("SELECT id, scope, bytes FROM entry ORDER BY used"):
                if left <= room_entries and left_bytes <= room_bytes:
                    break
                rows.append((number, scope))
                left, left_bytes = left - 1, left_bytes - its
        return rows

    def promise(self, tenant: str) -> Promise | None:
        row = self._db.execute("SELECT * FROM promise WHERE tenant = ?", (tenant,)).fetchone()
        return None if row is None else Promise(*row[1:])

    def verdicts(self, tenant: str) -> list[Verdict]:
        """The last verdicts of a tenant, oldest first."""
        rows = self._db.execute(
            "SELECT entry, features, vector, words, right FROM verdict WHERE tenant = ? ORDER BY id DESC LIMIT ?",
            (tenant, VERDICTS),
        ).fetchall()
        return [
            Verdict(
                entry,
                np.frombuffer(row),
                np.frombuffer(vector, dtype=np.float16),
                frozenset(orjson.loads(words)),
                bool(right),
            )
            for entry, row, vector, words, right in rows[::-1]
        ]

    def add_verdict(self, tenant: str, verdict: Verdict, promise: Promise) -> None:
        """One verdict, and the promise after it, in one transaction."""
        vector = verdict.vector.astype(np.float16).tobytes()
        words = orjson.dumps(sorted(verdict.words)).decode()
        row = (tenant, verdict.entry, verdict.features.tobytes(), vector, words, verdict.right)
        self._db.execute("BEGIN")
        self._db.execute(
            "INSERT INTO verdict (tenant, entry, features, vector, words, right) VALUES (?,?,?,?,?,?)", row
        )
        self._db.execute(
            "DELETE FROM verdict WHERE tenant = ? AND id <= "
            "(SELECT id FROM verdict WHERE tenant = ? ORDER BY id DESC LIMIT 1 OFFSET ?)", (tenant, tenant, VERDICTS)
        )  # fmt: skip
        state = (
            promise.delta,
            promise.alpha,
            promise.log_e,
            promise.wrong,
            promise.right,
            promise.audits,
            promise.wrong_audits,
        )
        self._db.execute("INSERT OR REPLACE INTO promise VALUES (?,?,?,?,?,?,?,?)", (tenant, *state))
        self._db.execute("COMMIT")
