"""The one process that writes the record of a sweep on several workers.

It cuts the plan into units, hands them to a launcher, saves each point as it arrives, and gives to another worker what
one that died had not measured. A point on which workers die TRIES times is written down as failed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from selfspec_cli import interrupts
from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.progress import Progress
from selfspec_cli.record.point import Point, from_json
from selfspec_cli.stages.launch import joblib, ray, submitit
from selfspec_cli.stages.launch.supervise import Ended
from selfspec_cli.stages.launch.units import Unit, cut, rest
from selfspec_cli.stages.plan import Plan, Planned


class Launcher(Protocol):
    """A module of this folder that runs units."""

    def workers(self, cfg: RunConfig) -> int:
        """How many units it can measure at once."""

    def launch(
        self, units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]
    ) -> Generator[tuple[Unit, str | Ended]]:
        """Measure units -> points as JSON as they come, and an `Ended` for each unit."""


TRIES = 2
"""Workers that may die on one point before it has failed."""
LAUNCHERS: dict[str, Launcher] = {"joblib": joblib, "ray": ray, "submitit": submitit}


def run(
    plan: Plan,
    cfg: RunConfig,
    run_id: str,
    folder: Path,
    *,
    save: Callable[[Point], None],
    fail: Callable[[Planned, Exception], None],
    progress: Progress,
    ends: float | None = None,
) -> int:
    """Measure a plan on the workers of `cfg.launcher`; how many of its points were not begun.

    Args:
        run_id: of the command; a unit's is this and its name, so that points of two units never have one name.
        folder: of results; workers write their logs into it.
        save: writes a point. fail: writes down that one could not be measured.
        ends: see `Unit`.

    Raises:
        ConfigError: the launcher cannot be used here, or the plan reuses baselines, which ran on one GPU.
    """
    launcher = _launcher(plan, cfg)
    units = cut(plan.families, launcher.workers(cfg), ends)
    finished: set[str] = set()
    deaths: Counter[str] = Counter()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number in range(len(plan.points) * TRIES + 1):
        if not units or (ends is not None and time.time() >= ends):
            break
        left: list[Unit] = []
        waiting = {unit.name: list(unit.points) for unit in units}  # the first of them is in hand
        for unit in units:
            progress.measuring(unit.points[0])
        with closing(launcher.launch(units, cfg, run_id, lambda unit: str(logs / f"{run_id}-{unit.name}.log"))) as came:
            for unit, item in came:
                interrupts.check()
                if not isinstance(item, Ended):
                    point = from_json(item)
                    save(point)
                    finished |= _taken_off(waiting[unit.name], point)
                    for following in waiting[unit.name][:1]:
                        progress.measuring(following)
                elif item.code:
                    for victim in waiting[unit.name][:1]:
                        _died(unit, victim, item, deaths, TRIES, finished, fail)
                    again = rest(unit, finished, f"{unit.name}r{number}")
                    left += [again] if again is not None else []
        units = left
    return sum(planned.key not in finished for planned in plan.points)


def _launcher(plan: Plan, cfg: RunConfig) -> Launcher:
    if plan.reused:
        raise ConfigError(
            f"--reuse-baseline with launcher={cfg.launcher.kind}: a point is compared with a baseline of the same GPU, "
            "and which GPU a worker gets is not known; leave --reuse-baseline out"
        )
    launcher = LAUNCHERS.get(str(cfg.launcher.kind))
    if launcher is None:
        raise ConfigError(
            f"launcher={cfg.launcher.kind}: it is for selfspec sweep alone; allowed here: local, {', '.join(LAUNCHERS)}"
        )
    for one in {planned.cfg.model.tensor_parallel_size: planned.cfg for planned in plan.points}.values():
        launcher.workers(one)  # raises for a model that is divided among more GPUs than there are
    return launcher


def _taken_off(waiting: list[Planned], point: Point) -> set[str]:
    """Take the point that has come off those that a worker was given; its key in the plan. By its settings, because
    the worker's machine may give it another key."""
    came = next((one for one in waiting if to_plain(one.cfg) == point.config), None)
    if came is None:
        return set()
    waiting.remove(came)
    return {came.key}


def _died(
    unit: Unit,
    victim: Planned,
    ended: Ended,
    deaths: Counter[str],
    tries: int,
    finished: set[str],
    fail: Callable[[Planned, Exception], None],
) -> None:
    """Count a dead worker against the point that it had in hand; after `tries` of them the point has failed, and with a
    baseline all that would be compared with it."""
    deaths[victim.key] += 1
    if deaths[victim.key] < tries:
        return
    lost = [victim, *(one for one in unit.points if victim.is_baseline and one.baseline == victim.key)]
    for one in {one.key: one for one in lost}.values():
        if one.key not in finished:
            fail(one, RuntimeError(str(ended)))
            finished.add(one.key)
