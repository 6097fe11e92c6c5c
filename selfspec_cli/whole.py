"""Files that are there whole or not at all, and where those are kept that can be made again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """Gives a path beside `file` to write to, and puts what was written in its place, whole and on the disk, when the
    block ends. A block that fails leaves `file` as it was. Raises OSError: the folder cannot be made or written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)  # safetensors writes files that only their owner can read
        with part.open("rb") as content:
            os.fsync(content.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def atomic_write(file: Path, text: str) -> None:
    """Write a whole file of text, as `written`."""
    with written(file) as part:
        part.write_text(text, encoding="utf-8")


def cache_dir() -> Path:
    """Where files are kept that can be made again: $XDG_CACHE_HOME/selfspec, or ~/.cache/selfspec."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "selfspec"
