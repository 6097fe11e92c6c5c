"""Ctrl-C, taken where it is safe: one interrupt ends the command at its next safe place, and is never lost.

Python raises KeyboardInterrupt wherever it happens to be, also inside a destructor or a weak reference's callback,
where the exception is printed and dropped. So while `deferred` holds, an interrupt only leaves a note, and `check`,
called between engine steps, repeats and points, raises. A second Ctrl-C does not wait.

SIGTERM, which Slurm, containers and `timeout` send, is the same inside `by_sigterm`: it would end this process alone,
and an engine of vLLM's would go on without it and hold its GPU.

While an engine starts there is no safe place for a minute. There, in `at_once`, an interrupt raises where it is, and
`check` raises again if that was dropped: a half-started engine is thrown away in either case. What it raises is no
KeyboardInterrupt there: vLLM drops one while it waits for its engine's process, and then waits on.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from selfspec_cli import terminal

_waiting = False  # an interrupt has come and its KeyboardInterrupt has not yet ended the outermost `deferred`
_depth = 0

NOTE = "\ninterrupt: this command ends as soon as the work in hand allows it; press Ctrl-C again to end it at once\n"


def check() -> None:
    """A safe place. Raises KeyboardInterrupt if an interrupt waits, and again at every later place until it has ended
    the outermost `deferred`: one that something on the way has swallowed comes back."""
    if _waiting:
        raise KeyboardInterrupt


@contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferred() -> Iterator[None]:
    """Take SIGINT at `check` and at the end of the outermost block only. Outside the main thread it changes nothing."""
    global _waiting, _depth
    if not _in_main_thread():
        yield
        return
    with _handled(signal.SIGINT, _note) if _depth == 0 else nullcontext():
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
            _waiting = _waiting and _depth > 0


class _AtOnce(BaseException):
    """A KeyboardInterrupt by a name that nobody catches."""


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, an interrupt does not wait: for work that has no safe places, and of which nothing is kept. One that
    waits already, such as one that came while the last engine was closed, is raised before the work begins."""
    with deferred():
        check()
        try:
            with _handled(signal.SIGINT, _end) if _in_main_thread() else nullcontext():
                yield
        except _AtOnce:
            raise KeyboardInterrupt from None


@contextmanager
def by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does, unless it is somebody else's or this is not the main thread."""
    ours = _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with _handled(signal.SIGTERM, _as_interrupt) if ours else nullcontext():
        yield


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:  # a shell lets what it starts in the background ignore SIGINT
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _waiting
    waited, _waiting = _waiting, True
    if waited:
        raise KeyboardInterrupt
    terminal.tell(NOTE)


def _end(number: int, frame: FrameType | None) -> None:
    global _waiting
    _waiting = True
    raise _AtOnce
