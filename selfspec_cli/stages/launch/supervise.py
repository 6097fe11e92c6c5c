"""A worker process and what comes of it, wherever the supervisor itself runs: a thread, a Ray task, a Slurm job."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli.stages.launch.units import ENDS, Unit
from selfspec_cli.terminal import last_lines

POLL = 0.1  # seconds between two looks at the spool
SHOWN = 3  # last lines of a worker's output that its end is explained with


@dataclass(frozen=True)
class Ended:
    """How a worker ended: its exit code, negative for a signal, and its last lines where it failed."""

    code: int
    why: str = ""

    def __str__(self) -> str:
        how = f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"
        return f"its worker {how}" + (f": {self.why}" if self.why else "")


Sent = tuple[Unit, str | Ended]
"""What a launcher hands on: a unit, and one of its points as JSON or how its worker ended."""


def points_of(
    document: dict[str, Any],
    environment: Mapping[str, str],
    log: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str | Ended]:
    """Run a worker -> each point as JSON, as soon as it is measured, and how the worker ended, last.

    The worker has a process group of its own, which is killed when the iterator is closed or an exception ends it.

    Args:
        document: `units.description` of a unit. environment: variables on top of this process's own.
        log: file to which the worker's output is appended; a temporary one if None.
        stopped: asked while the worker runs; once it says yes, the worker is killed.
    """
    with tempfile.TemporaryDirectory(prefix="selfspec-unit-") as place:
        spool = Path(place)
        file, output = spool / "unit.json", Path(log) if log else spool / "log"
        file.write_text(json.dumps(document), encoding="utf-8")
        with output.open("ab") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "selfspec_cli.stages.launch.worker", str(file), place],
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
        try:
            while process.poll() is None and not stopped():
                yield from _taken(spool)
                time.sleep(POLL)
            yield from _taken(spool)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engines that it left, too
            process.wait()
        last = "" if process.returncode == 0 else " / ".join(map(str.strip, last_lines(output, SHOWN)))
        yield Ended(process.returncode, last)


def _taken(spool: Path) -> Iterator[str]:
    for file in sorted(spool.glob(f"*{ENDS}")):
        text = file.read_text(encoding="utf-8")
        file.unlink()
        yield text
