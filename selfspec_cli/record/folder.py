"""A results folder: points in `runs/`, written so that none is lost or torn, and the tables that are made of them.

A point is there from the moment that its file has its name; until then its text is in a file that ends in .part. Lines
are added to the tables under a lock that is held while the file gets its name, so that a table and the points agree
unless a process is killed in between; `prepare` and `export` make the tables again.
"""

import csv
import errno
import os
import secrets
import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, columns, profiles, quality, tables
from selfspec_cli.record.columns import TABLES, AcceptRow, Summary
from selfspec_cli.record.guarded import RecordError as RecordError
from selfspec_cli.record.guarded import explained, locked, not_writable, sweep_lock
from selfspec_cli.record.point import Point, from_json, head_from_line, to_json
from selfspec_cli.whole import written

RUNS, SUMMARY = "runs", "summary.csv"


def new_run_id() -> str:
    """Names one run of one command, by UTC to the microsecond and one random byte; sorts by time."""
    moment = datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond:05x}{secrets.token_hex(1)}"


def now() -> str:
    """The time of a point: ISO 8601 to the second, with the offset from UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def save(results: str | os.PathLike[str], point: Point) -> Path:
    """Write a point, once and for all, and add its lines to the tables. When this returns the point is on disk.

    Raises:
        RecordError: it could not be written, or there is such a point already; nothing of it is left.
    """
    archive.refuse(results)
    runs = Path(results) / RUNS
    target = runs / f"{point.id}.json"
    part = runs / f".{point.id}.{os.getpid()}.part"
    with explained(target):
        runs.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(to_json(point))
                file.flush()
                os.fsync(file.fileno())
            with locked(runs):
                _give_name(part, target)
                _sync(runs)
                _add_lines(Path(results), point)
        finally:
            part.unlink(missing_ok=True)
    return target


def _give_name(part: Path, target: Path) -> None:
    """Let a file appear under its name, whole and only if nothing has that name."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if target.exists():  # a file system without hard links; the lock keeps others of ours away
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        part.rename(target)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _add_lines(results: Path, point: Point) -> None:
    row, accept = tables.row(point), tables.accept_row(point)
    for name, kind in reversed(TABLES.items()):  # summary.csv last: what it lists is in the others, too (`prepare`)
        record = accept if kind is AcceptRow else row
        if record is not None and columns.has_line(kind, record):
            _add_line(results / name, columns.header_line(kind), columns.line(kind, record))


def _add_line(path: Path, head: str, line: str) -> None:
    """Append a line, with the header before the first one. What cannot be written whole is not written at all."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        end = os.fstat(handle).st_size
        torn = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
        rest = ((head if end == 0 else "\n" if torn else "") + line).encode()
        try:
            while rest:  # a write may take less than it was given
                rest = rest[os.write(handle, rest) :]
        except OSError as error:
            os.ftruncate(handle, end)
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def heads(results: str | os.PathLike[str]) -> list[Point]:
    """Of every readable point what its first line says, in the order in which they were measured."""
    if archive.inside(results) is not None:
        return read(results)[0]
    points = []
    for file in _files(results):
        with suppress(ValueError, OSError), file.open(encoding="utf-8") as opened:
            points.append(head_from_line(opened.readline()))
    return in_order(points)


def read(results: str | os.PathLike[str], names: Collection[str] | None = None) -> tuple[list[Point], list[str]]:
    """The points of a folder in the order in which they were measured, and at most one warning about other files.

    Args:
        names: only points of which the id or the key is one of these.
    """
    points, strange = [], []
    for file in _files(results):
        if names is not None and file.stem not in names and file.stem.partition("-")[0] not in names:
            continue
        try:
            points.append(from_json(archive.read_text(file)))
        except (ValueError, OSError) as error:
            strange.append(f"{file.name} ({' '.join(str(error).split())[:80]})")
    points = quality.attach(points, quality.read(results)) if points else []
    more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
    folder = Path(results) / RUNS
    return in_order(points), [f"no points in {folder}: {', '.join(strange[:3])}{more}; left alone"] if strange else []


def with_quality(results: str | os.PathLike[str], point: Point) -> Point:
    """A point with what the folder knows of its arm's quality."""
    return quality.attach([point], quality.read(results))[0]


def save_finding(results: str | os.PathLike[str], finding: quality.Finding) -> Path:
    """Write a finding about an arm's quality, and make the tables again, for its columns are in them.

    Raises:
        RecordError: it could not be written.
    """
    archive.refuse(results)
    with explained(Path(results) / quality.FOLDER / f"{finding.name}.json"):
        path = quality.save(results, finding)
    if (Path(results) / RUNS).is_dir():
        export(results)
    return path


def save_profile(results: str | os.PathLike[str], profile: profiles.Profile, trace: bytes) -> Path:
    """Write a profile and its trace.

    Raises:
        RecordError: it could not be written.
    """
    archive.refuse(results)
    with explained(Path(results) / profiles.FOLDER / profile.trace):
        return profiles.save(results, profile, trace)


def in_order(points: list[Point]) -> list[Point]:
    """Points by the command that measured them, then by their place in it."""
    return sorted(points, key=lambda point: (point.run_id, point.number))


def _files(results: str | os.PathLike[str]) -> list[Path]:
    return archive.files(Path(results) / RUNS, "[!.]*.json")


def export(results: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[int, list[str]]:
    """Make the tables again from the points, each at once or not at all; (points, warnings).

    Args:
        out: a folder for the tables, if not the results folder itself. Of an archive they can only be made elsewhere.

    Raises:
        ConfigError: `out`, or the results folder without one, is an archive.
        RecordError: a table could not be written; it is as it was.
    """
    place = Path(results if out is None else out)
    archive.refuse(place)
    runs = Path(results) / RUNS
    with explained(place):
        (runs if out is None else place).mkdir(parents=True, exist_ok=True)
        with locked(runs) if out is None else nullcontext():
            points, warnings = read(results)
            rows = [tables.row(point) for point in points]
            accepts = [row for point in points if (row := tables.accept_row(point)) is not None]
            for name, kind in TABLES.items():
                made = [one for one in (accepts if kind is AcceptRow else rows) if columns.has_line(kind, one)]
                if made or (place / name).exists():
                    _replace(place / name, columns.text(kind, made))
    return len(points), warnings


def delete(results: str | os.PathLike[str], ids: Collection[str]) -> list[str]:
    """Delete points for good and make the tables again; the warnings.

    Raises:
        ConfigError: another command is writing to the folder.
        RecordError: a file could not be deleted, or a table not be written.
    """
    runs = Path(results) / RUNS
    with sweep_lock(results), explained(runs):
        with locked(runs):
            for name in ids:
                (runs / f"{name}.json").unlink(missing_ok=True)
            _sync(runs)
        return export(results)[1]


def _replace(path: Path, text: str) -> None:
    path = path.resolve()  # a link stays a link
    with explained(path), written(path) as part:
        part.write_text(text, encoding="utf-8")


def prepare(results: str | os.PathLike[str]) -> list[str]:
    """Make certain, before anything is measured, that points can be written here, and that the tables are those of the
    points. To be called with the folder's `sweep_lock` held.

    A table that is something else is kept beside the new one, under another name; the warnings say so.

    Raises:
        ConfigError: the folder cannot be written.
    """
    archive.refuse(results)
    folder = Path(results)
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        for left in [*(folder / RUNS).glob(".*.part"), *folder.glob(".*.part")]:
            left.unlink()  # of a process that was killed
        probe = folder / RUNS / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(not_writable(folder, error)) from error
    warnings = []
    for name, kind in TABLES.items():
        path = folder / name
        if _listed(path, kind) is None:
            aside = next(other for n in range(1, 1000) if not (other := folder / f"{name}.{n}").exists())
            path.rename(aside)
            warnings.append(
                f"{path} was not a table of this version of selfspec; it is now {aside.name}, and a new "
                f"{name} is made from {folder / RUNS}"
            )
    ids = [file.stem for file in _files(results)]
    if sorted(_listed(folder / SUMMARY, Summary) or []) != ids:
        export(results)
    return warnings


def _listed(path: Path, kind: type) -> list[str] | None:
    """The points that a table lists; None for a file that is no whole table of this version."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, OSError):
        return None
    if text and not (text.startswith(columns.header_line(kind)) and text.endswith("\n")):
        return None
    width = len(columns.header(kind))
    rows = list(csv.reader(text.splitlines()[1:], delimiter="\t" if kind is AcceptRow else ","))
    return [cells[-1] for cells in rows] if all(len(cells) == width for cells in rows) else None
