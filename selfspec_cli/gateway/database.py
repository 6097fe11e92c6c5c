"""SQLite files that several processes of a gateway use at once; a kill at any moment leaves them whole."""

import sqlite3
from pathlib import Path

from selfspec_cli.early_exit.errors import SettingsError

BUSY_SECONDS = 2.0  # for which a writer waits for the one before it


def database(path: Path, version: int, schema: str) -> sqlite3.Connection:
    """The tables of a file that its owner alone may read. schema: statements that change nothing where they were run
    before. Raises SettingsError for a file that is no such database."""
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
