"""Files that several processes of a gateway use at once: the log of requests, and SQLite databases."""

from __future__ import annotations

import os
import sqlite3
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway import wire

LOG = "requests.jsonl"
BUSY_SECONDS = 2.0  # for which a writer waits for the one before it


def database(path: Path, version: int, schema: str) -> sqlite3.Connection:
    """The tables of a file that its owner alone may read, and that a kill at any moment leaves whole.

    schema: statements that change nothing where they were run before. Raises SettingsError for a file that is no such
    database.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.chmod(0o600)
    found = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        found.execute("PRAGMA journal_mode=WAL")
        found.execute("PRAGMA synchronous=NORMAL")
        if found.execute("PRAGMA user_version").fetchone()[0] not in (0, version):
            raise SettingsError(f"{path} is of another version: remove it")
        found.executescript(f"BEGIN IMMEDIATE; {schema}; PRAGMA user_version={version}; COMMIT")
    except sqlite3.DatabaseError as error:
        found.close()
        raise SettingsError(f"{path} cannot be used: {error}") from error
    return found


class RequestLog:
    """One JSON object a line, written by a thread, so that a slow disk delays no token. text: what was asked is in it;
    otherwise its hash."""

    def __init__(self, file: Path, text: bool = False) -> None:
        self.file, self.text = file, text
        self._thread = ThreadPoolExecutor(1, "log")
        self._fails = False
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self._thread.submit(self._append, wire.dumps(row) + b"\n")

    def write(self) -> None:
        """Wait until every row is in the file."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _append(self, line: bytes) -> None:
        """In one write: lines of several processes do not mix."""
        try:
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
            self._fails = False
        except OSError as error:  # a full disk ends the log, not the gateway
            if not self._fails:
                print_fault(error)
            self._fails = True


def print_fault(error: BaseException) -> None:
    """Show an error of the gateway's own to whoever runs it."""
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
