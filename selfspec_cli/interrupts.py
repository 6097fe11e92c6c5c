"""Ctrl-C, taken where it is safe: one interrupt ends the command at its next safe place, and is never lost.

Python raises KeyboardInterrupt wherever it happens to be, also inside a destructor or a weak reference's callback,
where the exception is printed and dropped. So while `deferred` holds, an interrupt only leaves a note, and `check`,
called between engine steps, repeats and points, raises. A second Ctrl-C does not wait.

While an engine starts there is no safe place for a minute. There, in `at_once`, an interrupt raises where it is, and
`check` raises again if that was dropped: a half-started engine is thrown away in either case.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from selfspec_cli import terminal

_waiting = False  # an interrupt has come and its KeyboardInterrupt has not yet ended the outermost `deferred`
_depth = 0
_patient = True  # an interrupt waits for `check`

NOTE = "\ninterrupt: this command ends as soon as the work in hand allows it; press Ctrl-C again to end it at once\n"


def check() -> None:
    """A safe place. Raises KeyboardInterrupt if an interrupt waits, and again at every later place until it has ended
    the outermost `deferred`: one that something on the way has swallowed comes back."""
    if _waiting:
        raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Take SIGINT at `check` and at the end of the outermost block only. Outside the main thread it changes nothing."""
    global _waiting, _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _note) if _depth == 0 else None
    _depth += 1
    try:
        yield
        check()
    except Exception as error:  # an engine's own processes have got the interrupt too, and may be gone
        if _waiting:
            raise KeyboardInterrupt from error
        raise
    finally:
        _depth -= 1
        if _depth == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
            _waiting = False


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, an interrupt does not wait: for work that has no safe places, and of which nothing is kept. One that
    waits already, such as one that came while the last engine was closed, is raised before the work begins."""
    global _patient
    before, _patient = _patient, False
    try:
        check()
        yield
    finally:
        _patient = before
    check()


def _note(number: int, frame: FrameType | None) -> None:
    global _waiting
    waited, _waiting = _waiting, True
    if waited or not _patient:
        raise KeyboardInterrupt
    terminal.tell(NOTE)
