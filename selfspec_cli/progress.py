"""How long work says where it is: a callable, so that stages know nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): a bar named `what`; it goes away when done reaches total."""


def ignore(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


@contextmanager
def bars(enabled: bool = True) -> Iterator[Progress]:
    """Progress bars on stderr, one for each `what`; on a stderr that is no terminal rich draws none."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, disable=not (enabled and console.is_terminal)) as display:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what, total=total)
            display.update(tasks[what], completed=done, total=total)
            if done >= total:
                display.remove_task(tasks.pop(what))

        yield progress
