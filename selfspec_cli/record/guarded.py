"""Locks of a results folder, and what the file system refuses as messages that say what to do."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing.util import register_after_fork
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive


class RecordError(Exception):
    """A result could not be written. The text names the path, the reason and what to do."""


@contextmanager
def sweep_lock(results: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a results folder for one command; the lock ends with the process, however it ends.

    Raises:
        ConfigError: another live process holds it (the message names its pid), or the folder cannot be written.
    """
    archive.refuse(results)
    path = Path(results) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(not_writable(Path(results), error)) from error
    with os.fdopen(handle, "r+b", buffering=0) as file:
        # An engine that is forked from this process and outlives it must not go on holding the folder.
        register_after_fork(file, FileIO.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read(32).decode().strip() or "unknown"
            raise ConfigError(
                f"another selfspec command (pid {pid}) is writing to {results}; wait for it, or choose another "
                "folder: results_dir=NAME"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        yield


@contextmanager
def locked(runs: Path) -> Iterator[None]:
    """Hold the tables of a folder; others wait."""
    handle = os.open(runs / ".tables.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the file system refuses, as a RecordError that says what to do."""
    try:
        yield
    except FileExistsError as error:
        raise RecordError(f"{path} is there already; a point is never written twice") from error
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "make it writable"
        raise RecordError(
            f"{error.filename or path} could not be written: {reason}. What was measured before is kept; "
            f"{remedy} and give the same command again, or choose another folder: results_dir=NAME"
        ) from error


def not_writable(folder: Path, error: OSError) -> str:
    return (
        f"results_dir={folder}: {error.filename or folder} cannot be written ({error.strerror}); make it writable, "
        "or choose another folder: results_dir=NAME"
    )
