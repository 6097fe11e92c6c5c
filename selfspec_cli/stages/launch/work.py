"""A plan, cut into units that different workers can measure; and the supervisor of a unit's worker.

A unit is some engines of one family with all their points, and the family's baselines, which are measured again in each
unit: a candidate is only compared with a baseline of the same GPU. No two workers of a host share a GPU or a core.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli import children
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.stages.plan import Family, Planned
from selfspec_cli.terminal import last_lines

CORES = "SELFSPEC_CORES"  # environment variable of a worker: the cores that it may use, separated by commas
A_WORKER = 2  # cores that an engine on the CPU needs


def free(cfg: RunConfig) -> list[str]:
    """What workers on this host can be given: its idle pairs of cores, such as "0,1", or its GPUs."""
    if device_of(cfg) == "cpu":
        return [",".join(map(str, pair)) for pair in free_pairs(own_cores(), os.getloadavg()[0])]
    return gpu_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), len(machine.gpus()))


def environment(cfg: RunConfig, held: Sequence[str]) -> dict[str, str]:
    """Environment variables of a worker that holds some of `free`; of one that has what Slurm gives it, without any."""
    if device_of(cfg) != "cpu":
        return of_gpus(held) if held else {}
    cores = held[0].split(",") if held else []
    return ({CORES: held[0]} if held else {}) | {"OMP_NUM_THREADS": str(len(cores) or A_WORKER)}


def free_pairs(cores: Sequence[int], load: float) -> list[list[int]]:
    """The cores in pairs, as many pairs as are idle; at least one. load: processes that run now."""
    pairs = [list(cores[start : start + A_WORKER]) for start in range(0, len(cores) - A_WORKER + 1, A_WORKER)]
    idle = int(max(len(cores) - load, 0)) // A_WORKER
    return pairs[: max(idle, 1)] or [list(cores)]


def own_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def gpu_numbers(visible: str | None, count: int) -> list[str]:
    """What to write into CUDA_VISIBLE_DEVICES for each GPU. visible: the variable as it is; count: GPUs of the host."""
    return visible.split(",") if visible else [str(number) for number in range(count)]


def of_gpus(numbers: Sequence[str]) -> dict[str, str]:
    """Environment variables of a worker that has these GPUs: which they are, and the cores next to the first."""
    near = near_cores(numbers[0])
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers)} | ({CORES: ",".join(map(str, near))} if near else {})


def near_cores(gpu: str) -> list[int]:
    """This process' cores on the NUMA node of a GPU; empty where nothing says, or it has none of them."""
    try:
        ((bus,),) = machine.asked_of_gpus("pci.bus_id", f"--id={gpu}")
        words = Path(f"/sys/bus/pci/devices/{bus[-12:].lower()}/local_cpulist").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    own = set(own_cores())  # taskset or a batch system may have given this process fewer
    near = []
    for part in filter(None, words.split(",")):
        low, _, high = part.partition("-")
        near += [core for core in range(int(low), int(high or low) + 1) if core in own]
    return near


ENDS = ".point.json"  # ends the name of a file in which a worker leaves a point
POLL = 0.1  # seconds between two looks at the spool
SHOWN = 3  # last lines of a worker's output that its end is explained with


@dataclass(frozen=True)
class Unit:
    """What one worker measures, in order. name: unique in a command. ends: no point begins later (epoch seconds)."""

    name: str
    points: tuple[Planned, ...]
    ends: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs that its engines take."""
        return max(planned.cfg.model.tensor_parallel_size for planned in self.points)

    @property
    def devices(self) -> int:
        """What of `free` it takes: a pair of cores, or its GPUs."""
        return 1 if device_of(self.points[0].cfg) == "cpu" else self.gpus


def description(unit: Unit, run_id: str) -> dict[str, Any]:
    """A unit as JSON: all that a worker on another machine has to know."""
    points = [
        {"config": to_plain(one.cfg), "key": one.key, "device": one.device, "digests": one.digests}
        for one in unit.points
    ]
    return {"run_id": run_id, "ends": unit.ends, "versions": _deciding(machine.versions()), "points": points}


def keys_of(document: Mapping[str, Any], cfgs: Sequence[RunConfig]) -> dict[str, str]:
    """The plan's key by that of a worker's machine, where both mean the same point, so that the next command finds it:
    they differ by the device alone where a worker has fewer cores, or the driver has no GPU (a login node)."""
    keys, found = Keys(), {}
    same_versions = document["versions"] == _deciding(machine.versions())
    for cfg, planned in zip(cfgs, document["points"], strict=True):
        here, there = keys.device(cfg), planned["device"]
        like = there == machine.describe([]) or here.rpartition(",")[0] == there.rpartition(",")[0] != ""
        if same_versions and like and keys.digests(cfg) == planned["digests"]:
            found[keys.run(cfg)] = planned["key"]
    return found


def _deciding(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name in machine.DECISIVE}


def cut(families: Sequence[Family], workers: int, ends: float | None = None) -> list[Unit]:
    """Units for `workers` workers, the largest first. A family gets its share of units, and at least one; its groups of
    points are dealt out, each to the unit that has the fewest points so far."""
    engines = sum(max(len(family.groups), 1) for family in families)
    made: list[tuple[Planned, ...]] = []
    for family in families:
        share = math.ceil(workers * len(family.groups) / engines) if engines else 1
        piles: list[list[list[Planned]]] = [[] for _ in range(max(min(share, len(family.groups)), 1))]
        for group in sorted(family.groups, key=len, reverse=True):
            min(piles, key=lambda pile: sum(map(len, pile))).append(group)
        made += [tuple(point for group in [family.baselines, *pile] for point in group) for pile in piles]
    ordered = sorted(filter(None, made), key=len, reverse=True)
    return [Unit(f"u{number}", points, ends) for number, points in enumerate(ordered)]


def rest(unit: Unit, finished: set[str], name: str) -> Unit | None:
    """What is left of a unit; None if nothing is. finished: keys of points that are on disk, measured or failed.
    Baselines stay as long as a candidate is left: the next worker may get another GPU."""
    candidates = [planned for planned in unit.points if not planned.is_baseline and planned.key not in finished]
    needed = {planned.baseline for planned in candidates}
    baselines = [planned for planned in unit.points if planned.is_baseline]
    points = [planned for planned in baselines if planned.key in needed or planned.key not in finished]
    return replace(unit, name=name, points=(*points, *candidates)) if points or candidates else None


@dataclass(frozen=True)
class Ended:
    """How a worker ended: its exit code, negative for a signal, and its last lines where it failed."""

    code: int
    why: str = ""

    def __str__(self) -> str:
        how = f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"
        return f"its worker {how}" + (f": {self.why}" if self.why else "")


Sent = tuple[Unit, str | Ended]
"""What a launcher hands on: a unit, and one of its points as JSON or how its worker ended."""


def points_of(
    document: dict[str, Any],
    environment: Mapping[str, str],
    log: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str | Ended]:
    """Run a worker -> each point as JSON, once it is measured, and last how the worker ended. Its process group is
    killed when the iterator is closed. document: `description` of a unit. environment: further variables. log: where
    the worker's output is appended; a temporary file if None. stopped: once it says yes, the worker is killed."""
    with tempfile.TemporaryDirectory(prefix="selfspec-unit-") as place:
        spool = Path(place)
        file, output = spool / "unit.json", Path(log) if log else spool / "log"
        file.write_text(json.dumps(document), encoding="utf-8")
        with output.open("ab") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "selfspec_cli.stages.launch.worker", str(file), place],
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
        try:
            while process.poll() is None and not stopped():
                yield from _taken(spool)
                time.sleep(POLL)
            yield from _taken(spool)
        finally:
            children.end(process, signal.SIGKILL, 0)  # with engines that it left
        last = "" if process.returncode == 0 else " / ".join(map(str.strip, last_lines(output, SHOWN)))
        yield Ended(process.returncode, last)


def _taken(spool: Path) -> Iterator[str]:
    for file in sorted(spool.glob(f"*{ENDS}")):
        text = file.read_text(encoding="utf-8")
        file.unlink()
        yield text
