"""What a command shows of its work, without a terminal: the state that its reports make, and how that is drawn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from selfspec_cli.record import tables
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import label
from selfspec_cli.stages.plan import Plan, Planned, distinguishing_settings

ROWS = 12  # arms shown at once
OF_AN_ARM = ("warm-up", "repeats")  # counts that the row of the arm shows
FIGURES = ("repeats", "tok/s (min to max)", "speedup (95 %)")  # beside the name of an arm


@dataclass
class ArmRow:
    """One arm of a sweep. seconds: what measuring it took, without its engine's start."""

    name: str
    state: str = "waiting"  # or: running, done, failed
    repeats: tuple[int, int] = (0, 0)  # done, of
    tok_s: list[float] = field(default_factory=list)  # of each timed repeat
    speedup: str = ""
    seconds: float | None = None

    @property
    def speed(self) -> str:
        """Median tokens a second so far, and the range of the repeats."""
        if not self.tok_s:
            return ""
        middle = f"{statistics.median(self.tok_s):.1f}"
        return middle if len(self.tok_s) < 2 else f"{middle} ({min(self.tok_s):.0f} to {max(self.tok_s):.0f})"

    @property
    def share(self) -> float:
        """How much of its repeats is done, 0 to 1."""
        done, total = self.repeats
        return 1.0 if self.state in ("done", "failed") else done / total if total else 0.0


@dataclass
class Count:
    """Something that is counted."""

    began: float
    done: int
    total: int


@dataclass
class State:
    """Everything that a command has reported. clock: seconds, never going back."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    arms: dict[str, ArmRow] = field(default_factory=dict)  # by run key, in the order in which they are measured
    current: str | None = None
    since: float = 0.0  # when the current arm was begun
    counts: dict[str, Count] = field(default_factory=dict)
    engine: tuple[str, float] | None = None  # the engine that starts, since when
    engines: int = 0  # that a sweep needs
    starts: list[float] = field(default_factory=list)  # seconds that each engine took
    expected: float | None = None  # seconds, before anything was measured

    def __post_init__(self) -> None:
        self.began = self.clock()

    def plan(self, plan: Plan) -> None:
        """A sweep begins."""
        apart = distinguishing_settings(plan.points)
        self.arms = {
            planned.key: ArmRow(
                "  ".join(filter(None, (label(tables.planned(planned.cfg, planned.key)), apart[planned.key])))
            )
            for planned in plan.points
        }
        self.engines, self.starts, self.expected, self.began = len(plan.engines), [], plan.seconds, self.clock()

    def measuring(self, planned: Planned) -> None:
        """A point is in hand."""
        self.current, self.since = planned.key, self.clock()
        if planned.key in self.arms:
            self.arms[planned.key].state = "running"

    def measured(self, point: Point) -> None:
        """A point is written down."""
        row = tables.row(point)
        arm = self.arms.setdefault(point.key, ArmRow(label(row)))
        arm.state, arm.seconds = "done" if point.ok else "failed", point.seconds
        if not arm.tok_s:  # workers and load tests send whole points, not one repeat after the other
            arm.tok_s = list(point.tok_s)
        if row.speedup is not None and point.compared_with is not None:
            arm.speedup = f"{row.speedup:.2f}x"
            if row.speedup_low is not None and row.speedup_high is not None:
                arm.speedup += f" ({row.speedup_low:.2f} to {row.speedup_high:.2f})"
        self.current = None
        for what in OF_AN_ARM:
            self.counts.pop(what, None)

    def count(self, what: str, done: int, total: int) -> Count:
        """Something was counted; what is complete is no longer shown."""
        count = self.counts.setdefault(what, Count(self.clock(), 0, total))
        count.done, count.total = done, total
        if what == "repeats" and self.current in self.arms:
            self.arms[self.current].repeats = (done, total)
        if done >= total:
            self.counts.pop(what)
        return count

    def left(self) -> float | None:
        """Seconds until the sweep ends, by what was measured; by earlier runs before that; None if neither says."""
        known = [arm.seconds for arm in self.arms.values() if arm.seconds]
        if not known:
            return None if self.expected is None else max(self.expected - (self.clock() - self.began), 0.0)
        waiting = sum(1 - arm.share for arm in self.arms.values())
        if not self.starts:  # workers start engines out of sight, and measure several arms at once
            return waiting * (self.clock() - self.began) / len(known)
        arms = statistics.mean(known) * waiting
        return arms + statistics.mean(self.starts) * max(self.engines - len(self.starts), 0)

    def count_left(self, count: Count) -> float | None:
        """Seconds until a count is complete, at its pace so far."""
        return (self.clock() - count.began) / count.done * (count.total - count.done) if count.done else None


def duration(seconds: float) -> str:
    """For people: 40 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def in_one_line(state: State) -> str:
    """What is being done, and for how long."""
    if state.engine is not None:
        what, since = state.engine
        return f"starting an engine: {what}, {duration(state.clock() - since)} so far"
    arm = state.arms.get(state.current or "")
    if arm is not None:
        repeats = f"{_repeats(arm)} repeats" if arm.repeats[1] else _repeats(arm)
        return (
            f"measuring {arm.name}: {', '.join(filter(None, (repeats, duration(state.clock() - state.since))))} so far"
        )
    counts = [f"{what}: {count.done:,} of {count.total:,}" for what, count in state.counts.items()]
    return f"{', '.join(counts) or 'at work'}, {duration(state.clock() - state.began)} so far"


def draw(state: State, log: str | None, width: int) -> Group:
    """The whole picture: arms, what is counted, the engine that starts, where the log is. width: columns."""
    parts: list[Table | Text] = []
    if state.arms:
        done = sum(arm.state in ("done", "failed") for arm in state.arms.values())
        left = state.left()
        tail = "" if left is None else f", about {duration(left)} left"
        so_far = duration(state.clock() - state.began)
        parts += [Text(f"{done} of {len(state.arms)} arms measured, {so_far} so far{tail}"), _table(state, width)]
    for what, count in state.counts.items():
        if not (what in OF_AN_ARM and state.arms):
            left = state.count_left(count)
            tail = "" if left is None else f", about {duration(left)} left"
            parts.append(Text(f"{what}: {count.done:,} of {count.total:,}{tail}"))
    if state.engine is not None:
        what, since = state.engine
        parts.append(Text(f"starting an engine: {what}, {duration(state.clock() - since)}"))
    if log is not None:
        parts.append(Text(f"log: {log}", style="dim"))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _table(state: State, width: int) -> Table:
    """The arms around the one in hand. Where the terminal is narrow, their names are cut and nothing else."""
    arms = list(state.arms.values())
    place = next((at for at, arm in enumerate(arms) if arm.state in ("running", "waiting")), len(arms))
    first = max(0, min(place - ROWS // 2, len(arms) - ROWS))
    shown = [(arm, (_repeats(arm), arm.speed, arm.speedup)) for arm in arms[first : first + ROWS]]
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("arm", no_wrap=True)
    room = width
    for at, title in enumerate(FIGURES):
        table.add_column(title, no_wrap=True, overflow="ellipsis", justify="right")
        room -= max(len(title), *(len(cells[at]) for _, cells in shown)) + 2
    for arm, cells in shown:
        style = {"running": "bold", "waiting": "dim", "failed": "red"}.get(arm.state, "")
        name = Text(arm.name)
        name.truncate(max(room, 8), overflow="ellipsis")
        table.add_row(name, *cells, style=style)
    if len(arms) > ROWS:
        table.add_row(f"({len(arms) - ROWS} more)", "", "", "", style="dim")
    return table


def _repeats(arm: ArmRow) -> str:
    if arm.state == "failed":
        return "failed"
    if arm.state == "running" and not arm.repeats[1]:
        return "warm-up"
    return "{} of {}".format(*arm.repeats) if arm.repeats[1] else ""
