"""The one process that writes the record of a sweep on several workers.

It cuts the plan into units, hands them to a launcher, saves each point as it arrives, and gives to another worker what
one that died had not measured. A point on which workers die `launcher.tries` times is written down as failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from selfspec_cli import interrupts
from selfspec_cli.config.schema import ConfigError, RunConfig
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
) -> None:
    """Measure a plan on the workers of `cfg.launcher`.

    Args:
        run_id: of the command; a unit's is this and its name, so that points of two units never have one name.
        folder: of results; workers write their logs into it.
        save: writes a point. fail: writes down that one could not be measured.

    Raises:
        ConfigError: the launcher cannot be used here, or the plan reuses baselines, which ran on one GPU.
    """
    if plan.reused:
        raise ConfigError(
            f"--reuse-baseline with launcher={cfg.launcher.kind}: a point is compared with a baseline of the same GPU, "
            "and which GPU a worker gets is not known; leave --reuse-baseline out"
        )
    launcher = LAUNCHERS.get(str(cfg.launcher.kind))
    if launcher is None:
        raise ConfigError(f"launcher={cfg.launcher.kind}: it is for selfspec sweep alone; allowed here: local, "
                          f"{', '.join(LAUNCHERS)}")  # fmt: skip
    units = cut(plan.families, launcher.workers(cfg))
    planned = {one.key: one for one in plan.points}
    finished: set[str] = set()
    deaths: Counter[str] = Counter()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number in range(len(plan.points) * cfg.launcher.tries + 1):
        if not units:
            return
        left: list[Unit] = []
        running: dict[str, Planned] = {unit.name: unit.points[0] for unit in units}
        for one in running.values():
            progress.measuring(one)
        with closing(launcher.launch(units, cfg, run_id, lambda unit: str(logs / f"{run_id}-{unit.name}.log"))) as came:
            for unit, item in came:
                interrupts.check()
                if not isinstance(item, Ended):
                    point = from_json(item)
                    save(point)
                    finished.add(point.key)
                    following = next((one for one in unit.points if one.key not in finished), None)
                    if following is not None:
                        running[unit.name] = following
                        progress.measuring(following)
                    continue
                if item.code == 0:
                    continue
                _died(unit, running[unit.name], item, deaths, cfg.launcher.tries, finished, fail, planned)
                again = rest(unit, finished, f"{unit.name}r{number}")
                left += [again] if again is not None else []
        units = left


def _died(
    unit: Unit,
    victim: Planned,
    ended: Ended,
    deaths: Counter[str],
    tries: int,
    finished: set[str],
    fail: Callable[[Planned, Exception], None],
    planned: dict[str, Planned],
) -> None:
    """Count a dead worker against the point that it had in hand; after `tries` of them the point has failed, and with a
    baseline all that would be compared with it."""
    deaths[victim.key] += 1
    if deaths[victim.key] < tries:
        return
    lost = [victim, *(one for one in unit.points if victim.is_baseline and one.baseline == victim.key)]
    for one in {one.key: one for one in lost}.values():
        if one.key not in finished:
            fail(planned.get(one.key, one), RuntimeError(str(ended)))
            finished.add(one.key)
