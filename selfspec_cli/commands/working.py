"""While a command works: its own lines on the terminal, everything else in a log file beside the record.

On a terminal one picture is drawn in place. Into a pipe go lines: one as each part begins and ends, and one whenever
nothing was said for `QUIET` seconds. The picture is not drawn while requests are timed, because an engine on the CPU
shares its process with this screen: it changes between repeats, and follows the clock only while an engine starts.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from selfspec_cli import interrupts, terminal
from selfspec_cli.commands import progress_table, screen
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder
from selfspec_cli.record.point import Point
from selfspec_cli.stages.plan import Plan, Planned

LOGS = "logs"
QUIET = 30.0  # seconds between two lines into a pipe
SHOWN = 12  # lines of the log that a failure shows


class Screen(Progress):
    """What a user sees of a command at work. plans: what its sweeps were to measure."""

    def __init__(self, stream: TextIO, log: Path | None, *, in_place: bool | None = None) -> None:
        self.console = Console(file=stream)
        self.log = log
        self.state = progress_table.State()
        self.plans: list[Plan] = []
        self._named = False  # whether a line has said where the log is
        self._said: dict[str, float] = {}  # when a count was last spoken of
        self._busy = False  # whether a line has said that other programs are in the way
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._spoke = time.monotonic()  # when the last line was said
        draws = self.console.is_terminal if in_place is None else in_place
        self._live = (
            Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=self._picture,
            )
            if draws
            else None
        )

    def _picture(self) -> RenderableType:
        return progress_table.draw(self.state, None if self.log is None else str(self.log), self.console.width)

    def open(self) -> None:
        """Begin to draw, or to speak."""
        if self._live is not None:
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._break_silence, daemon=True).start()

    def _break_silence(self) -> None:
        """Say what is being done whenever nothing was said for `QUIET` seconds, until the screen closes."""
        while not self._closed.wait(max(self._spoke + QUIET - time.monotonic(), 0.01)):
            if time.monotonic() - self._spoke >= QUIET:
                self.say(progress_table.in_one_line(self.state))

    def close(self, keep: bool) -> None:
        """Stop drawing. keep: leave the last picture on the terminal."""
        self._closed.set()
        self.started()
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line above the picture, broken between words. The first one into a pipe is followed by where the log is."""
        self._spoke = time.monotonic()
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)
        if self._live is None and self.log is not None and not self._named:
            self._named = True
            self.say(f"log: {self.log}")

    def refresh(self) -> None:
        """Draw what has changed."""
        if self._live is not None:
            self._live.refresh()

    # ---- what stages report ---------------------------------------------------------------------------------------

    def __call__(self, what: str, done: int, total: int) -> None:
        count = self.state.count(what, done, total)
        self.refresh()
        if self._live is not None or what in progress_table.OF_AN_ARM:
            return
        now = self.state.clock()
        if done >= total or now - self._said.get(what, count.began) >= QUIET:
            self._said[what] = now
            left = self.state.count_left(count) if done < total else None
            self.say(
                f"{what}: {done:,} of {total:,}"
                + ("" if left is None else f", about {progress_table.duration(left)} left")
            )

    def ended(self, what: str, done: int, total: int) -> None:
        self.state.counts.pop(what, None)
        self.refresh()
        if self._live is None and what not in progress_table.OF_AN_ARM and done < total:
            self.say(f"{what}: ended after {done:,} of {total:,}")

    def speeds(self, tok_s: Sequence[float]) -> None:
        arm = self.state.arms.get(self.state.current or "")
        if arm is not None:
            arm.tok_s = list(tok_s)

    def planned(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.state.plan(plan)
        self.say(screen.plan_in_short(plan))
        self.refresh()

    def starting(self, what: str) -> None:
        self.state.engine = (what, self.state.clock())
        if self._live is None:
            return self.say(f"starting an engine: {what}")
        self.refresh()
        self._ready = threading.Event()
        threading.Thread(target=self._follow_the_clock, args=(self._ready,), daemon=True).start()

    def _follow_the_clock(self, ready: threading.Event) -> None:
        while not ready.wait(1.0):
            self.refresh()

    def started(self) -> None:
        if self.state.engine is None:
            return
        self._ready.set()
        self.state.starts.append(self.state.clock() - self.state.engine[1])
        self.state.engine = None
        self.refresh()

    def measuring(self, planned: Planned) -> None:
        self.state.measuring(planned)
        arm = self.state.arms.get(planned.key)
        if self._live is None and arm is not None:
            self.say(f"measuring {arm.name}")
        self.refresh()

    def busy(self, others: float) -> None:
        if not self._busy:
            self._busy = True
            self.say(
                f"other programs have {others:.0%} of the processor: this takes longer, on a CPU many times as long, "
                "and its times are not to be trusted",
                "yellow",
            )

    def measured(self, point: Point) -> None:
        self.state.measured(point)
        arm = self.state.arms[point.key]
        if not point.ok:
            self.failed(arm.name, str(point.reason))
        elif self._live is None:
            done = sum(one.state in ("done", "failed") for one in self.state.arms.values())
            left = self.state.left()
            tail = f"; about {progress_table.duration(left)} left" if left else ""
            speedup = f", {arm.speedup}" if arm.speedup else ""
            self.say(f"arm {done} of {len(self.state.arms)}: {arm.name}: {arm.speed} tok/s{speedup}{tail}")
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


@contextmanager
def at_work(command: str, results_dir: str | Path, debug: bool) -> Iterator[Screen]:
    """Show the work of `command`; its log goes to `results_dir`/logs. debug: everything goes to the terminal instead.

    A failure first shows the last lines of the log; bad input and an interrupt do not.
    """
    with interrupts.by_sigterm():
        if debug:
            with redirect_stdout(sys.stderr):
                yield Screen(sys.stderr, None, in_place=False)
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
