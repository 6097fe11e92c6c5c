"""Files of a results folder, and of an archive: a folder as one compressed file of JSON lines, read like the folder.

A line is one file: `{"file": "runs/ID.json", "data": {...}}`, or `"text"` in place of `data` for a file that is no
JSON. A path may lead into an archive as into a folder (`gpu/lowbit.jsonl.xz/int4_E8/runs`). Nothing is written into
one: `pack` makes a whole archive, and the same files give the same bytes.
"""

import json
import lzma
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.whole import atomic_write, written

SUFFIX = ".jsonl.xz"
KEPT = (".json", ".csv", ".tsv", ".yaml")
TABLES = (".csv", ".tsv")  # tables beside a folder `runs` are made of its points, and therefore not kept
FORMAT = 1  # of a document
T = TypeVar("T")


def inside(path: str | os.PathLike[str]) -> Path | None:
    """The archive that a path names or leads into; None for other paths."""
    full = Path(path)
    return next((place for place in (full, *full.parents) if place.name.endswith(SUFFIX) and place.is_file()), None)


def refuse(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError where a path is an archive or lies in one: nothing can be written to it."""
    if (archive := inside(path)) is not None:
        what = f"results_dir={archive} is an archive of published results, which is only read"
        raise ConfigError(f"{what}; name a folder: results_dir=NAME (selfspec runs export: --out NAME)")


def expect(path: str | os.PathLike[str], setting: str) -> None:
    """Raise ConfigError where there is no such folder or archive, with the name that is nearly this one."""
    folder = Path(path)
    if is_folder(folder):
        return
    near = get_close_matches(folder.name, [other.name for other in folder.parent.glob("*") if is_folder(other)], n=1)
    hint = f"; did you mean {folder.parent / near[0]}?" if near else ""
    raise ConfigError(f"{setting}={path}: there is no such folder{hint}")


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, an archive, or a folder of an archive."""
    archive = inside(path)
    if archive is None:
        return path.is_dir()
    return path == archive or any(path in file.parents for file in contents(archive))


def files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder, or of a folder of an archive, whose names match a pattern; sorted, not those below it."""
    archive = inside(folder)
    if archive is None:
        return sorted(folder.glob(pattern))
    return sorted(file for file in contents(archive) if file.parent == folder and file.match(pattern))


def read_text(file: Path) -> str:
    """The text of a file of a folder or of an archive; raises OSError, or UnicodeDecodeError where it is no text."""
    archive = inside(file)
    if archive is None:
        return file.read_text(encoding="utf-8")
    if file not in (lines := contents(archive)):
        raise FileNotFoundError(2, "there is no such file in the archive", str(file))
    line = json.loads(lines[file])
    return str(line["text"]) if "text" in line else json.dumps(line["data"], ensure_ascii=False)


def below(root: Path, name: str) -> list[Path]:
    """Every folder or file called `name` at or below `root`, also in archives; sorted."""
    archive = inside(root)
    if archive is None:
        packed = (path for archive in root.rglob(f"*{SUFFIX}") for path in below(archive, name))
        return sorted([*root.rglob(name), *packed])
    paths = {path for file in contents(archive) for path in (file, *file.parents)}
    return sorted(path for path in paths if path.name == name and path.is_relative_to(root))


def contents(archive: Path) -> dict[Path, str]:
    """Every file of an archive, with its line; raises ConfigError where it is no archive."""
    status = archive.stat()
    return _read(archive, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=128)
def _read(archive: Path, stamp: tuple[int, int]) -> dict[Path, str]:
    try:
        lines = lzma.decompress(archive.read_bytes()).decode().splitlines()
        return {archive / json.loads(line)["file"]: line for line in lines}
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{archive} is no archive of results: {' '.join(str(error).split())}") from error


def shown(path: str | os.PathLike[str]) -> str:
    """A path without the archive's ending, as the folder that was packed is called."""
    return str(path).replace(SUFFIX, "")


def pack(folder: Path, archive: Path) -> int:
    """Write an archive of what a folder holds: points, findings, verdicts, profiles and other JSON, CSV and YAML files
    below it. Traces, logs, pictures and tables that are made of the points are left out. The number of files; raises
    ConfigError where there are none, one is no JSON, or the archive cannot be written."""
    if not archive.name.endswith(SUFFIX):
        raise ConfigError(f"{archive}: the name of an archive ends in {SUFFIX}")
    lines = []
    for file in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name = file.relative_to(folder)
        is_made = file.suffix in TABLES and (file.parent / "runs").is_dir()
        if file.suffix not in KEPT or is_made or any(part.startswith(".") for part in name.parts):
            continue
        text = file.read_bytes().decode()
        try:
            content = {"data": json.loads(text)} if file.suffix == ".json" else {"text": text}
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: {error}") from error
        lines.append(json.dumps({"file": name.as_posix()} | content, separators=(",", ":")) + "\n")
    if not lines:
        raise ConfigError(f"{folder} holds nothing to publish")
    try:
        with written(archive) as part:
            part.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    except OSError as error:
        raise ConfigError(f"{error.filename or archive} cannot be written ({error.strerror})") from error
    return len(lines)


def save_document(file: Path, document: Any) -> Path:
    """Write a dataclass, such as a finding or a profile, as a JSON file of its own; raises OSError."""
    atomic_write(file, json.dumps({"format": FORMAT} | asdict(document), ensure_ascii=False) + "\n")
    return file


def json_objects(folder: Path) -> list[dict[str, Any]]:
    """The JSON objects of a folder, or of one in an archive, the oldest first. Other files are left alone."""
    found = []
    for file in files(folder, "[!.]*.json"):
        with suppress(ValueError, OSError):
            data = json.loads(read_text(file))
            if isinstance(data, dict):
                found.append(((str(data.get("time")), file.stem.partition("-")[2]), data))
    return [data for _, data in sorted(found, key=lambda pair: pair[0])]


def documents(folder: Path, kind: type[T]) -> Iterator[T]:
    """Yield what `save_document` wrote, the oldest first. Entries that `kind` has no field for are left out."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for data in json_objects(folder):
        with suppress(TypeError):
            if data.get("format") == FORMAT:
                yield kind(**{name: value for name, value in data.items() if name in names})
