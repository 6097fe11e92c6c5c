"""Workers as Slurm jobs, or as processes of this host where there is no Slurm. The folder of results is shared."""

import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.extras import install
from selfspec_cli.record import folder
from selfspec_cli.record.point import from_json
from selfspec_cli.stages.launch import joblib, work
from selfspec_cli.stages.launch.work import Ended, Sent, Unit, description, points_of
from selfspec_cli.whole import atomic_write

POLL = 0.5  # seconds
JOBS_AT_ONCE = 16  # of Slurm, where nothing is said
MINUTES = 240  # that a job may take; Slurm's own SBATCH_TIMELIMIT and SBATCH_PARTITION win


def on_slurm() -> bool:
    """Whether jobs can be submitted to Slurm here."""
    return shutil.which("srun") is not None


def workers(cfg: RunConfig) -> int:
    """How many jobs are submitted at once."""
    return cfg.launcher.workers or JOBS_AT_ONCE if on_slurm() else joblib.workers(cfg)


def job(document: dict[str, Any], spool: str, environment: dict[str, str], log: str) -> str:
    """Supervise a worker, and move its points to the shared spool -> how it ended, in words, empty where all went
    well."""
    ended = Ended(1, "the supervisor stopped")
    for number, item in enumerate(points_of(document, environment, log)):
        if isinstance(item, Ended):
            ended = item
            continue
        atomic_write(Path(spool) / f"{number:04d}.json", item)
    return "" if ended.code == 0 else str(ended)


def launch(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """As `joblib.launch`, each unit as a job."""
    try:
        from submitit import AutoExecutor
    except ModuleNotFoundError as error:
        raise ConfigError(f"launcher=submitit: submitit is not installed: {install('slurm')}") from error
    place = Path(log(units[0])).parent / f"{run_id}-jobs"
    executor = AutoExecutor(folder=place, cluster="slurm" if on_slurm() else "local")
    on_cpu = device_of(cfg) == "cpu"
    executor.update_parameters(timeout_min=MINUTES, cpus_per_task=work.A_WORKER if on_cpu else 8)
    # Once: the load of this host's own workers would lessen it. Slurm says itself what a job has; here submitit would
    # give the first GPU to each.
    free, count = None if on_slurm() else work.free(cfg), workers(cfg)
    waiting, running = list(units), dict[str, tuple[Unit, Path, Any]]()
    held: dict[str, list[str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < count and (free is None or len(free) >= waiting[0].devices):
                unit = waiting.pop(0)
                held[unit.name] = [free.pop(0) for _ in range(unit.devices)] if free is not None else []
                spool = place / f"spool-{unit.name}"
                spool.mkdir(parents=True)
                if not on_cpu:
                    executor.update_parameters(gpus_per_node=unit.gpus)
                environment = work.environment(cfg, held[unit.name])
                words = (description(unit, f"{run_id}{unit.name}"), str(spool), environment, log(unit))
                running[unit.name] = unit, spool, executor.submit(job, *words)
            for name, (unit, spool, submitted) in list(running.items()):
                done = submitted.done()
                for file in sorted(spool.glob("*.json")):
                    yield unit, file.read_text(encoding="utf-8")
                    file.unlink()
                if done:
                    del running[name]
                    if free is not None:
                        free += held.pop(name)
                    yield unit, _end(submitted)
            interrupts.check()
            time.sleep(POLL)
    finally:
        for _, _, submitted in running.values():
            submitted.cancel()


def _end(submitted: Any) -> Ended:
    try:
        why = submitted.result()
    except Exception as error:  # submitit's own and whatever the job raised
        why = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    return Ended(0) if not why else Ended(1, why)


def collect(results: str | os.PathLike[str]) -> list[str]:
    """Move points that jobs left after their driver had died into the record; what it says of them, for people."""
    found = sorted(Path(results).glob("logs/*-jobs/spool-*/*.json"))
    for file in found:
        try:
            folder.save(results, from_json(file.read_text(encoding="utf-8")))
        except folder.RecordError as error:
            if not isinstance(error.__cause__, FileExistsError):  # saved, and the driver died before it took it away
                raise
        file.unlink()
    return [f"{len(found)} point(s) that jobs of an earlier command had measured were taken in"] if found else []
