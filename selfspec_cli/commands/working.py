"""While a command works: its own lines on the terminal, everything else in a log file beside the record.

A line says what has begun or ended. On a terminal a status below the lines says what is being done; in a pipe a line
says it whenever nothing was said for `QUIET` seconds. The status follows the clock only while an engine starts, because
an engine on the CPU, whose requests are timed, shares its process with this screen.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from selfspec_cli import interrupts, terminal
from selfspec_cli.commands import screen
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder, tables
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import label, times
from selfspec_cli.report.table import speed
from selfspec_cli.stages.plan import Plan, Planned, distinguishing_settings

LOGS = "logs"
QUIET = 30.0  # seconds between two lines into a pipe
SHOWN = 12  # lines of the log that a failure shows
OF_AN_ARM = ("warm-up", "repeats")  # counts that make no line of their own in a pipe


@dataclass
class Count:
    """Something that is counted. began, said: when it was, and when a line last spoke of it."""

    began: float
    said: float
    done: int = 0
    total: int = 0


class Screen(Progress):
    """What a user sees of a command at work. plans: what its sweeps were to measure."""

    def __init__(self, stream: TextIO, log: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """log: where everything else goes; None where it goes to the same stream, so that no status is drawn."""
        self.console = Console(file=stream)
        self.log, self.clock = log, clock
        self.plans: list[Plan] = []
        self.arms: dict[str, str] = {}  # of the sweep: name by run key
        self.finished: set[str] = set()
        self.expected: float | None = None  # seconds of the sweep, before anything was measured
        self.counts: dict[str, Count] = {}
        self.doing, self.since = "at work", clock()
        self._sweep_began = clock()
        self._starting = self._busy = self._named = False  # an engine starts; a line has named: other programs, the log
        self._closed = threading.Event()
        self._spoke = time.monotonic()  # when the last line was said
        self._live = None
        if self.console.is_terminal and log is not None:
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=self._picture,
            )

    def open(self) -> None:
        """Begin to draw, or to speak."""
        if self._live is not None:
            self._live.start(refresh=True)
        threading.Thread(target=self._follow_the_clock, daemon=True).start()

    def _follow_the_clock(self) -> None:
        while not self._closed.wait(min(QUIET, 1.0)):
            if self._live is not None:
                if self._starting:
                    self._live.refresh()
            elif time.monotonic() - self._spoke >= QUIET:
                self.say(self.status())

    def close(self, keep: bool) -> None:
        """Stop drawing. keep: leave the last status on the terminal."""
        self._closed.set()
        self.refresh()
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line above the status, broken between words. The first one is followed by where the log is."""
        self._spoke = time.monotonic()
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)
        if self.log is not None and not self._named:
            self._named = True
            self.say(f"log: {self.log}")

    def refresh(self) -> None:
        """Draw what has changed."""
        if self._live is not None:
            self._live.refresh()

    def status(self) -> str:
        """What is being done, and for how long."""
        return ", ".join(
            [self.doing, *map(self._counted, self.counts), f"{duration(self.clock() - self.since)} so far"]
        )

    def _counted(self, what: str) -> str:
        count = self.counts[what]
        pace = (self.clock() - count.began) / count.done if count.done else None
        left = None if pace is None else pace * (count.total - count.done)
        return f"{what}: {count.done:,} of {count.total:,}{_about(left)}"

    def _picture(self) -> Text:
        lines = [self.status()]
        if self.arms:
            so_far = duration(self.clock() - self._sweep_began)
            lines += [f"{len(self.finished)} of {len(self.arms)} arms measured, {so_far} so far{_about(self.left())}"]
        return Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")

    def left(self) -> float | None:
        """Seconds until the sweep ends, by what was measured; by earlier runs before that; None if neither says."""
        so_far = self.clock() - self._sweep_began
        if not self.finished:
            return None if self.expected is None else max(self.expected - so_far, 0.0)
        repeats = self.counts.get("repeats")
        done = len(self.finished) + (repeats.done / repeats.total if repeats else 0.0)
        return so_far / done * (len(self.arms) - done)

    def _begin(self, doing: str) -> None:
        self.doing, self.since = doing, self.clock()
        if self._live is None:
            self.say(doing)
        self.refresh()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self.clock()
        count = self.counts.setdefault(what, Count(now, now))
        count.done, count.total = done, total
        quiet = done < total and now - count.said < QUIET
        if self._live is None and what not in OF_AN_ARM and not quiet:
            count.said = now
            self.say(self._counted(what))
        if done >= total:
            del self.counts[what]
        self.refresh()

    def ended(self, what: str, done: int, total: int) -> None:
        self.counts.pop(what, None)
        self.refresh()
        if self._live is None and what not in OF_AN_ARM and done < total:
            self.say(f"{what}: ended after {done:,} of {total:,}")

    def planned(self, plan: Plan) -> None:
        self.plans.append(plan)
        apart = distinguishing_settings(plan.points)
        names = {one.key: (label(tables.planned(one.cfg, one.key)), apart[one.key]) for one in plan.points}
        self.arms = {key: "  ".join(filter(None, words)) for key, words in names.items()}
        self.finished, self.expected, self._sweep_began = set(), plan.seconds, self.clock()
        self.say(screen.plan_in_short(plan))
        self.refresh()

    def starting(self, what: str) -> None:
        self._starting = True
        self._begin(f"starting an engine: {what}")

    def started(self) -> None:
        if self._starting:
            self._starting = False
            self.doing, self.since = "at work", self.clock()
            self.refresh()

    def measuring(self, planned: Planned) -> None:
        if planned.key in self.arms:
            self._begin(f"measuring {self.arms[planned.key]}")

    def busy(self, others: float) -> None:
        if not self._busy:
            self._busy = True
            self.say(
                f"other programs have {others:.0%} of the processor: this takes longer, on a CPU many times as long, "
                "and its times are not to be trusted",
                "yellow",
            )

    def measured(self, point: Point) -> None:
        row = tables.row(point)
        name = self.arms.setdefault(point.key, label(row))
        self.finished.add(point.key)
        for what in OF_AN_ARM:
            self.counts.pop(what, None)
        if point.ok:
            place = f"arm {len(self.finished)} of {len(self.arms)}"
            speedup = f", {times(row)}" if point.compared_with is not None else ""
            self.say(f"{place}: {name}: {speed(row)} tok/s{speedup}{_about(self.left())}")
        else:
            self.failed(name, str(point.reason))
        self.refresh()

    def failed(self, what: str, reason: str) -> None:
        self.say(f"failed: {what}: {reason}", "red")
        self.show_log()

    def show_log(self) -> None:
        """The last lines of the log, and where all of it is."""
        sys.stderr.flush()
        lines = [] if self.log is None else terminal.last_lines(self.log, SHOWN)
        if lines:
            self.say("\n".join(["the last lines of the log:", *(f"  {line[:400]}" for line in lines)]), "dim")
        if self.log is not None:
            self.say(f"all of it: {self.log}", "dim")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:03:20."""
    return str(timedelta(seconds=round(seconds)))


def _about(left: float | None) -> str:
    return f", about {duration(left)} left" if left else ""


@contextmanager
def at_work(command: str, results_dir: str | Path, debug: bool) -> Iterator[Screen]:
    """Show the work of `command`; its log goes to `results_dir`/logs. debug: everything goes to the terminal instead. A
    failure first shows the last lines of the log; bad input and an interrupt do not."""
    with interrupts.by_sigterm():
        if debug:
            with redirect_stdout(sys.stderr):
                yield Screen(sys.stderr, None)
            return
        log = Path(results_dir) / LOGS / f"{folder.new_run_id()}-{command}.log"
        with terminal.kept_apart(log) as user:
            shown = Screen(user, log)
            shown.open()
            try:
                yield shown
            except BaseException as error:
                shown.close(keep=True)
                if not isinstance(error, (ConfigError, KeyboardInterrupt, typer.Exit)):
                    shown.show_log()
                raise
            shown.close(keep=False)
