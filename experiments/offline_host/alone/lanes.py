"""Lanes on one GPU: while one of them is timed, all processes of the others are stopped.

SELFSPEC_LANE, in the environment of a lane's processes, is a path: its last part names the lane, and lanes of one
folder stop each other. The file `timed` in that folder is locked while a lane is timed, and says afterwards how long.

    python3 lanes.py alone COMMAND ...   the whole command is timed
    python3 lanes.py release FOLDER      every stopped process goes on; the caller holds the lock, so nobody is timed
"""

from __future__ import annotations

import fcntl
import functools
import importlib.abc
import importlib.machinery
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

LANE = "SELFSPEC_LANE"
WHOLE = "SELFSPEC_LANE_WHOLE"  # a command of this environment is timed as a whole: nothing in it asks for a turn again
TIMED = ("selfspec_cli.stages.measure", "selfspec_cli.engine.clients")
"""Modules whose function `run` times something."""


def lane_of(process: int) -> Path | None:
    """The lane that a process, or the nearest of its ancestors, was started in.

    The ancestors count because a process may write its title over its own environment, as vLLM's engines do.
    """
    with suppress(OSError):
        while process > 1:
            for word in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                name, _, value = os.fsdecode(word).partition("=")
                if name == LANE:
                    return Path(value)
            process = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])  # its parent
    return None


def signal_lanes(folder: Path, number: signal.Signals, *, but: str | None = None) -> None:
    """Send a signal to the processes of a folder's lanes, one lane excepted, and to those that they start meanwhile."""
    done: set[int] = set()
    while new := _processes(folder, but) - done:
        for process in new:
            with suppress(OSError):  # it has ended
                os.kill(process, number)
        done |= new


def _processes(folder: Path, but: str | None) -> set[int]:
    found = {int(name): lane_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {process for process, lane in found.items() if lane and lane.parent == folder and lane.name != but}


class _Turn:
    """The turn of this process's lane. What times inside of it, or in a thread beside, shares it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._users = 0
        self._file: TextIO | None = None
        self._asked = self._began = 0.0

    def enter(self, lane: Path) -> None:
        with self._guard:
            if not self._users:
                self._asked = time.monotonic()
                self._file = open(lane.parent / "timed", "a", encoding="utf-8")  # noqa: SIM115 (it is the lock)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                self._began = time.monotonic()
                signal_lanes(lane.parent, signal.SIGSTOP, but=lane.name)
            self._users += 1

    def leave(self, lane: Path) -> None:
        with self._guard:
            self._users -= 1
            if not self._users and self._file is not None:
                signal_lanes(lane.parent, signal.SIGCONT, but=lane.name)
                waited, timed = self._began - self._asked, time.monotonic() - self._began
                self._file.write(f"{time.strftime('%T')} {lane.name} waited {waited:.1f} s, was timed {timed:.1f} s\n")
                self._file.close()  # with it goes the lock, also if this process dies


_turn = _Turn()


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other lane is timed, and stop them all until the end of the block."""
    lane = Path(os.environ[LANE])
    _turn.enter(lane)
    try:
        yield
    finally:
        _turn.leave(lane)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that time where they are, and lets their `run` be alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in TIMED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.run = _timed(module.run)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _timed(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def timed(*args: Any, **more: Any) -> Any:
        with alone():
            return run(*args, **more)

    return timed


def install() -> None:
    """Let what this process times be alone, if it belongs to a lane."""
    if LANE in os.environ and WHOLE not in os.environ:
        sys.meta_path.insert(0, _Finder())


def main() -> int:
    verb, *words = sys.argv[1:]
    if verb == "release":
        signal_lanes(Path(words[0]), signal.SIGCONT)
        return 0
    with alone():
        return subprocess.call(words, env=os.environ | {WHOLE: "1"})


if __name__ == "__main__":
    sys.exit(main())
