"""Published results: a results folder as one compressed file of JSON lines, which is read like the folder.

A line is one file of the folder: `{"file": "runs/ID.json", "data": {...}}`, or `"text"` in place of `data` for a file
that is no JSON. A path may lead into an archive as into a folder (`gpu/lowbit.jsonl.xz/int4_E8/runs`). Nothing is
written into one: `pack` makes a whole archive, and the same files give the same bytes.
"""

import json
import lzma
import os
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.whole import written

SUFFIX = ".jsonl.xz"
MADE = (
    "summary.csv",
    "details.csv",
    "loads.csv",
    "quality.csv",
    "profiles.csv",
    "accept.tsv",
)
"""Tables that are made of the other files, and therefore not kept."""
KEPT = (".json", ".csv", ".tsv", ".yaml")


def inside(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """The archive that a path names or leads into, and the place inside it ("" for all of it); None for other paths."""
    full = Path(path)
    for candidate in (full, *full.parents):
        if candidate.name.endswith(SUFFIX) and candidate.is_file():
            rest = full.relative_to(candidate).as_posix()
            return candidate, "" if rest == "." else rest
    return None


def refuse(results: str | os.PathLike[str]) -> None:
    """Say that nothing can be written to an archive.

    Raises:
        ConfigError: `results` is one, or lies in one.
    """
    if inside(results) is not None:
        raise ConfigError(
            f"results_dir={results} is an archive of published results, which is only read; name a folder: "
            "results_dir=NAME (selfspec runs export: --out NAME)"
        )


def expect(path: str | os.PathLike[str], setting: str) -> None:
    """Say that a folder to read is missing, and which one has nearly its name.

    Raises:
        ConfigError: there is no such folder, and no such archive.
    """
    folder = Path(path)
    if is_folder(folder):
        return
    here = {
        str(other): other.name for other in folder.parent.glob("*") if other.is_dir() or other.name.endswith(SUFFIX)
    }
    near = get_close_matches(folder.name, here.values(), n=1)
    hint = f"; did you mean {next(name for name, short in here.items() if short == near[0])}?" if near else ""
    raise ConfigError(f"{setting}={path}: there is no such folder{hint}")


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, or one of an archive."""
    located = inside(path)
    if located is None:
        return path.is_dir()
    archive, within = located
    return not within or any(name.startswith(f"{within}/") for name in _lines(archive))


def files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder, or of a folder of an archive, whose names match a pattern; sorted, not those below it."""
    located = inside(folder)
    if located is None:
        return sorted(folder.glob(pattern))
    archive, within = located
    above = f"{within}/" if within else ""
    names = [name[len(above) :] for name in _lines(archive) if name.startswith(above)]
    return [folder / name for name in sorted(names) if "/" not in name and fnmatchcase(name, pattern)]


def read_text(file: Path) -> str:
    """The text of a file of a folder or of an archive.

    Raises:
        OSError: there is none.
        UnicodeDecodeError: it is no text.
    """
    located = inside(file)
    if located is None:
        return file.read_text(encoding="utf-8")
    archive, within = located
    if within not in _lines(archive):
        raise FileNotFoundError(2, "there is no such file in the archive", str(file))
    line = json.loads(_lines(archive)[within])
    return str(line["text"]) if "text" in line else json.dumps(line["data"], ensure_ascii=False)


def below(root: Path, name: str) -> list[Path]:
    """Every folder or file called `name` at or below `root`, also in archives; sorted."""
    if inside(root) is None:
        paths = list(root.rglob(name))
        for archive in root.rglob(f"*{SUFFIX}"):
            paths += below(archive, name)
        return sorted(paths)
    archive = (inside(root) or (root,))[0]
    matches = set()
    for file in _lines(archive):
        parts = file.split("/")
        matches |= {archive.joinpath(*parts[: at + 1]) for at, part in enumerate(parts) if fnmatchcase(part, name)}
    return sorted(path for path in matches if path.is_relative_to(root))


def contents(archive: Path) -> list[Path]:
    """Every file of an archive."""
    return [archive / name for name in _lines(archive)]


def shown(path: str | os.PathLike[str]) -> str:
    """A path without the archive's ending, as the folder that was packed is called."""
    return str(path).replace(SUFFIX, "")


@lru_cache(maxsize=128)
def _read(archive: Path, stamp: tuple[int, int]) -> dict[str, str]:
    try:
        lines = lzma.decompress(archive.read_bytes()).decode().splitlines()
        return {json.loads(line)["file"]: line for line in lines}
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{archive} is no archive of results: {' '.join(str(error).split())}") from error


def _lines(archive: Path) -> dict[str, str]:
    """The line of each file of an archive, by the file's name.

    Raises:
        ConfigError: it is no archive.
    """
    status = archive.stat()
    return _read(archive, (status.st_mtime_ns, status.st_size))


def pack(folder: Path, archive: Path) -> int:
    """Write an archive of what a folder holds: points, findings, verdicts, profiles and other JSON, CSV and YAML files
    below it. Traces, logs, pictures and tables that are made of the points are left out. The number of files.

    Raises:
        ConfigError: a name that does not end in SUFFIX, no files, a JSON file that is none, or it cannot be written.
    """
    if not archive.name.endswith(SUFFIX):
        raise ConfigError(f"{archive}: the name of an archive ends in {SUFFIX}")
    lines = []
    for file in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name = file.relative_to(folder)
        if file.suffix in KEPT and file.name not in MADE and not any(part.startswith(".") for part in name.parts):
            lines.append(_line(file, name.as_posix()))
    if not lines:
        raise ConfigError(f"{folder} holds nothing to publish")
    try:
        with written(archive) as part:
            part.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    except OSError as error:
        raise ConfigError(f"{error.filename or archive} cannot be written ({error.strerror})") from error
    return len(lines)


def _line(file: Path, name: str) -> str:
    text = file.read_bytes().decode()
    try:
        content = {"data": json.loads(text)} if file.suffix == ".json" else {"text": text}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    return json.dumps({"file": name} | content, separators=(",", ":")) + "\n"
