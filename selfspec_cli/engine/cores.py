"""How much of the processor cores a command and others had between two moments: on a busy machine speeds say less."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LEAST_SECONDS = 0.5  # the kernel counts in hundredths of a second, so that less says little


@dataclass(frozen=True)
class Moment:
    """Ticks of the cores that this process may use, all of them and those without work, and of what it has started."""

    all: int
    idle: int
    own: int


def now() -> Moment | None:
    """The counters as they are; None where /proc does not say."""
    try:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (PROC / "stat").read_text(encoding="utf-8").splitlines()]
        counted = [list(map(int, words[1:9])) for words in lines if words and words[0] in cores]
        # user, nice, system, idle, iowait, irq, softirq, and steal: what other guests of the host had (proc_stat(5))
        return Moment(sum(map(sum, counted)), sum(one[3] + one[4] for one in counted), _own())
    except (OSError, ValueError, IndexError):
        return None


def shares(before: Moment | None, after: Moment | None) -> dict[str, float]:
    """Of the time of all these cores, the shares of this command and of others; empty where they are not known."""
    if before is None or after is None:
        return {}
    passed, own = after.all - before.all, after.own - before.own
    if passed < LEAST_SECONDS * os.sysconf("SC_CLK_TCK"):
        return {}
    busy = passed - (after.idle - before.idle)
    return {"cpu_own": round(own / passed, 3), "cpu_others": round(max(busy - own, 0) / passed, 3)}


def processes() -> Iterator[tuple[int, str, list[str]]]:
    """Number, short name, and fields of /proc/N/stat from the state on (proc_pid_stat(5)), of each process here."""
    for stat in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            head, _, fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
            yield int(stat.parent.name), head.partition("(")[2], fields.split()


def _own() -> int:
    """Ticks of this process and of all that it has started, those that have ended included."""
    parents, used = {}, {}
    for number, _, fields in processes():
        parents[number], used[number] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(number, 0) for number in family)
