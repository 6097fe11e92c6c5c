"""The page of a folder while a sweep writes to it: made again after points, by a process of its own.

The sweep waits for that process: beside it, a measurement would be disturbed. In the sweep's own process the page's
libraries would stay in the memory that points report. So that thousands of points cost little, a page is made only when
what all pages took is at most `SHARE` of the time since the sweep began.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from selfspec_cli.report.make import PAGE

SHARE = 0.02
RELOAD = 10  # seconds after which a page that is watched looks for a newer one


def make(words: Sequence[str]) -> None:
    """Run `selfspec report` with these words, showing nothing. Raises subprocess.CalledProcessError if it fails."""
    command = [sys.executable, "-m", "selfspec_cli", "report", *words]
    # A session of its own: Ctrl-C is meant for the sweep, whose last page is still to be made.
    subprocess.run(command, check=True, capture_output=True, start_new_session=True)


@dataclass
class LivePage:
    """The page of `folder`. clock: seconds, never going back. make: makes it, from words of `selfspec report`."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    make: Callable[[Sequence[str]], None] = make
    began: float = field(init=False)
    spent: float = 0.0
    error: str | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.folder / PAGE

    def measured(self) -> None:
        """A point is on disk: make the page, if it is there not yet, or if there is time for it."""
        if self.error is None and (not self.spent or self.spent <= SHARE * (self.clock() - self.began)):
            self._make(["--reload", str(RELOAD)])

    def close(self) -> None:
        """The sweep is over: the last page looks for no newer one."""
        if self.error is None and self.spent:
            self._make([])

    def _make(self, words: Sequence[str]) -> None:
        start = self.clock()
        try:
            self.make([f"results_dir={self.folder}", "--json", *words])
        except (OSError, subprocess.SubprocessError) as error:
            self.error = f"the page could not be made: {error}"
        self.spent += max(self.clock() - start, 1e-6)
