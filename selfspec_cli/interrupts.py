"""Ctrl-C that is never lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or in a weak reference's callback
the interpreter prints "Exception ignored in ..." and goes on, and a sweep measures its next points as if nobody had
asked it to stop. So the signal is also remembered here, and asked for at places where stopping is safe.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class _State:
    asked: bool = False  # Ctrl-C was pressed since `watched` began
    holding: int = 0  # how many `held` blocks the main thread is in


_state = _State()


@contextmanager
def watched() -> Iterator[None]:
    """While this block runs, remember Ctrl-C. Does nothing outside the main thread, which no signal reaches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.asked = False
    before = signal.signal(signal.SIGINT, _remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _state.asked = False


def check() -> None:
    """A safe place to stop: raises KeyboardInterrupt if Ctrl-C was pressed and its exception was lost."""
    if _state.asked:
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """A block that Ctrl-C does not tear apart, such as writing what belongs together; it is raised at the end of it."""
    _state.holding += 1
    try:
        yield
    finally:
        _state.holding -= 1
    if not _state.holding:
        check()


def _remember(number: int, frame: FrameType | None) -> None:
    _state.asked = True
    if not _state.holding:
        raise KeyboardInterrupt
