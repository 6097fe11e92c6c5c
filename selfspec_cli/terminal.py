"""The user's terminal, kept apart from what vLLM, its libraries and its processes write.

They write to `sys.stderr`, through `logging` and `warnings`, and past Python to the file descriptors 1 and 2, which
child processes inherit. While a command works, all of that goes to a log file.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

_user = 2  # the file descriptor on which this process speaks to its user


def tell(text: str) -> None:
    """Write to the user at once, without a buffer; also from a signal handler."""
    os.write(_user, text.encode())


@contextmanager
def kept_apart(log: Path) -> Iterator[TextIO]:
    """Inside, all that is printed is appended to `log`; gives the stream that still reaches the user. In a process of
    its own the descriptors 1 and 2 stay with the log when the block ends, because libraries print while they are torn
    down, too. Where somebody has replaced `sys.stderr` (a test that captures it), they are put back."""
    global _user
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    own_process = sys.stderr is sys.__stderr__
    before = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    user = os.fdopen(os.dup(before[1]), "w", encoding="utf-8", buffering=1) if own_process else sys.stderr
    printed = sys.stderr if own_process else os.fdopen(os.dup(target), "w", encoding="utf-8", buffering=1)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    _user = before[1]
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield user
    finally:
        printed.flush()
        if own_process:
            sys.stderr = user
        else:
            printed.close()
            for descriptor, saved in enumerate(before, start=1):
                os.dup2(saved, descriptor)
            os.close(before[1])
            _user = 2
        os.close(before[0])


def last_lines(log: Path, count: int) -> list[str]:
    """The last `count` lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-count:]
