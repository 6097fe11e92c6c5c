"""The one process that writes the record of a sweep on several workers.

It hands units to a launcher, saves each point as it arrives, and gives to another worker what one that died had not
measured. A point on which workers die TRIES times is written down as failed.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from selfspec_cli import interrupts
from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.progress import Progress
from selfspec_cli.record.point import Point, from_json
from selfspec_cli.stages.launch.launchers import LAUNCHERS, Launcher
from selfspec_cli.stages.launch.work import Ended, Unit, cut, rest
from selfspec_cli.stages.plan import Plan, Planned

TRIES = 2  # workers that may die on one point before it has failed


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
    """Measure a plan on the workers of `cfg.launcher`; how many of its points were not begun. Raises ConfigError: the
    launcher cannot be used here, or the plan reuses baselines, which ran on one GPU. run_id: a unit's is this and its
    name, so that points of two units never have one name. folder: of results, and logs. save: writes a point. fail:
    writes down that one could not be measured. ends: see `Unit`."""
    launcher = _launcher(plan, cfg)
    units = cut(plan.families, launcher.workers(cfg), ends)
    finished: set[str] = set()
    deaths: Counter[str] = Counter()

    def died(unit: Unit, victim: Planned, ended: Ended) -> None:
        """Count a dead worker against the point in hand; after TRIES it has failed, and with a baseline all that need
        it."""
        deaths[victim.key] += 1
        if deaths[victim.key] < TRIES:
            return
        for one in unit.points:
            lost = one.key == victim.key or (victim.is_baseline and one.baseline == victim.key)
            if lost and one.key not in finished:
                fail(one, RuntimeError(str(ended)))
                finished.add(one.key)

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
                points = waiting[unit.name]
                if not isinstance(item, Ended):
                    point = from_json(item)
                    save(point)
                    # By its settings, because the worker's machine may give it another key.
                    for planned in [one for one in points if to_plain(one.cfg) == point.config][:1]:
                        points.remove(planned)
                        finished.add(planned.key)
                    for following in points[:1]:
                        progress.measuring(following)
                elif item.code:
                    for victim in points[:1]:
                        died(unit, victim, item)
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
