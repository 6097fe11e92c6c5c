"""A results folder: points in `runs/`, written so that none is lost or torn, and the tables that are made of them.

Until a point is whole its text is in a file that ends in .part. Its line in the tables follows at once; the tables are
made anew when a command that measures begins or ends, and by `export`.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from io import FileIO
from multiprocessing.util import register_after_fork
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, columns, quality, tables
from selfspec_cli.record.columns import TABLES, AcceptRow
from selfspec_cli.record.point import Point, from_json, to_json
from selfspec_cli.whole import atomic_write, written

RUNS, SUMMARY = "runs", "summary.csv"


class RecordError(Exception):
    """A result could not be written. The text names the path, the reason and what to do."""


@contextmanager
def writing(results: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a results folder for one command, and make its tables anew; the lock ends with the process. Raises
    ConfigError where another process holds it (named by its pid) or it cannot be written, RecordError for a table."""
    archive.refuse(results)
    folder = Path(results)
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        probe = folder / RUNS / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"results_dir={folder}: {error.filename or folder} cannot be written ({error.strerror}); make it writable, "
            "or choose another folder: results_dir=NAME"
        ) from error
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
        for left in [*(folder / RUNS).glob(".*.part"), *folder.glob(".*.part")]:
            left.unlink(missing_ok=True)  # of a process that was killed
        export(results)  # a process that was killed may have left a point without its line
        try:
            yield
        finally:
            export(results)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the file system refuses, as a RecordError that says what to do; ConfigError for a path in an archive."""
    archive.refuse(path)
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


def new_run_id() -> str:
    """Names one run of one command, by UTC to the microsecond and one random byte; sorts by time."""
    moment = datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond:05x}{secrets.token_hex(1)}"


def now() -> str:
    """The time of a point: ISO 8601 to the second, with the offset from UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def save(results: str | os.PathLike[str], point: Point) -> Path:
    """Write a point, once and for all, and its line in the tables; then it is on disk. Raises RecordError: it cannot be
    written or is there already, and nothing of it is left; or its line cannot, and the point is kept."""
    target = Path(results) / RUNS / f"{point.id}.json"
    with explained(target):
        if target.exists():
            raise FileExistsError
        atomic_write(target, to_json(point))
        _sync(target.parent)
    for name, text in _texts(with_quality(results, [point])).items():
        if line := text.partition("\n")[2]:
            path = Path(results) / name
            with explained(path), path.open("a", encoding="utf-8") as file:  # one write: several workers may write
                file.write(line if file.tell() else text)
    return target


def _texts(points: Sequence[Point]) -> dict[str, str]:
    """The text of each table: its header, and the lines that points have in it."""
    rows = [*map(tables.row, points)]
    accepts = [line for line in map(tables.accept_row, points) if line is not None]
    return {name: columns.text(kind, accepts if kind is AcceptRow else rows) for name, kind in TABLES.items()}


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(results: str | os.PathLike[str], names: Collection[str] | None = None) -> tuple[list[Point], list[str]]:
    """The points of a folder as they were measured, and at most one warning. names: ids or keys of those wanted."""
    points, strange = [], []
    for file in archive.files(Path(results) / RUNS, "[!.]*.json"):
        if names is not None and file.stem not in names and file.stem.partition("-")[0] not in names:
            continue
        try:
            points.append(from_json(archive.read_text(file)))
        except (ValueError, OSError) as error:
            strange.append(f"{file.name} ({' '.join(str(error).split())[:80]})")
    more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
    folder = Path(results) / RUNS
    warnings = [f"no points in {folder}: {', '.join(strange[:3])}{more}; left alone"] if strange else []
    return in_order(with_quality(results, points)), warnings


def with_quality(results: str | os.PathLike[str], points: Sequence[Point]) -> list[Point]:
    """Points with what the folder knows of the quality of their arms."""
    book = quality.read(results)
    return [replace(point, quality=book.columns(point.arm_key, point.key)) for point in points]


def save_finding(results: str | os.PathLike[str], finding: quality.Finding) -> Path:
    """Write a finding about an arm's quality, or raise RecordError."""
    file = Path(results) / quality.FOLDER / f"{finding.name}.json"
    with explained(file):
        return archive.save_document(file, finding)


def save_profile(results: str | os.PathLike[str], profile: quality.Profile, trace: bytes) -> Path:
    """Write a profile and its trace, or raise RecordError."""
    place = Path(results) / quality.PROFILES
    with explained(place / profile.trace), written(place / profile.trace) as part:
        part.write_bytes(trace)
    file = place / f"{profile.name}.json"
    with explained(file):
        return archive.save_document(file, profile)


def in_order(points: list[Point]) -> list[Point]:
    """Points by the command that measured them, then by their place in it."""
    return sorted(points, key=lambda point: (point.run_id, point.number))


def export(results: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[int, list[str]]:
    """Make the tables again from the points, each at once or not at all; (points, warnings). out: another folder for
    them. Raises ConfigError for one in an archive, RecordError for a table that cannot be written, and is as before."""
    place = Path(results if out is None else out)
    with explained(place):
        place.mkdir(parents=True, exist_ok=True)
        points, warnings = read(results)
        for name, text in _texts(points).items():
            if text.partition("\n")[2] or (place / name).exists():
                path = (place / name).resolve()  # a link stays a link
                with explained(path):
                    atomic_write(path, text)
    return len(points), warnings


def delete(results: str | os.PathLike[str], ids: Collection[str]) -> None:
    """Delete points for good and make the tables again; raises ConfigError and RecordError as `writing` does."""
    runs = Path(results) / RUNS
    with writing(results), explained(runs):
        for name in ids:
            (runs / f"{name}.json").unlink(missing_ok=True)
        _sync(runs)
