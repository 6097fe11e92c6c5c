"""Where the start of a vLLM server spends its time, read from what it logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

POLL_SECONDS = 0.02
MARKS: tuple[tuple[str, str], ...] = (
    ("imports of the API server", r" version \d+\.\d+|non-default args"),
    ("configuration, and imports of the engine's process", r"Initializing a V1 LLM engine"),
    ("the engine's device", r"Starting to load model|Loading model from scratch"),
    ("weights", r"Loading weights took"),
    ("the layers that draft, and their head", r"early exit: the layers that draft are ready"),
    ("compilation", r"torch\.compile took .* in total"),
    ("compilation of the layers that draft", r"early exit: the layers that draft are compiled"),
    ("profiling run", r"KV cache size"),
    ("kernels, and graphs of verify and decode steps", r"Capturing the draft loop|early exit: the draft loop"),
    ("graphs of the draft loop", r"early exit: the draft loop"),
    ("the rest of the graphs", r"Graph capturing finished"),
    ("the rest of the engine", r"init engine \(profile"),
    ("the server itself", r"Application startup complete|Starting vLLM server"),
)
"""What has ended where a line first matches, in the order of a start. A line that never comes is left out, and its time
counts for the next. Those of early exit are there in a server with early exit alone."""


def phases(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each phase, in order. lines: of the log, each with the seconds since the process was started."""
    found: dict[str, float] = {}
    known = list(lines)
    before, place = 0.0, 0
    for name, pattern in MARKS:
        for number in range(place, len(known)):
            if re.search(pattern, known[number][1]):
                found[name], before, place = known[number][0] - before, known[number][0], number
                break
    return found


def follow(log: Path, ended: Callable[[], bool]) -> list[tuple[float, str]]:
    """The lines of a growing log, each with the seconds after this call at which it was there, until `ended`."""
    began = time.monotonic()
    found: list[tuple[float, str]] = []
    rest, place = b"", 0
    while True:
        last = ended()
        if log.is_file():
            with open(log, "rb") as file:
                file.seek(place)
                new = file.read()
            place += len(new)
            *whole, rest = re.split(rb"[\r\n]+", rest + new)
            now = time.monotonic() - began
            found += [(now, line.decode(errors="replace")) for line in whole if line]
        if last:
            return found
        time.sleep(POLL_SECONDS)
