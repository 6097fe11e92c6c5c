"""Sweeps on several workers: on this host (joblib), on a Ray cluster, or as Slurm jobs (submitit).

Each launcher has `workers`, how many units it can measure at once, and `launch`, which measures units side by side ->
(unit, a point as JSON or how its worker ended), as they come. Closing the iterator ends the workers. The driver alone
writes the record: it saves each point, and hands on what a dead worker left, until TRIES have died on one point.
"""

import logging
import os
import queue
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.extras import install
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder as record_folder
from selfspec_cli.record.point import Point, from_json
from selfspec_cli.stages.launch import work
from selfspec_cli.stages.launch.work import Ended, Sent, Unit, cut, description, points_of, rest
from selfspec_cli.stages.plan import Plan, Planned
from selfspec_cli.whole import atomic_write


def workers_here(cfg: RunConfig) -> int:
    """How many units this host can measure at once."""
    asked = cfg.launcher.workers
    if device_of(cfg) == "cpu":
        room = len(work.free(cfg))
    else:
        room = len(machine.visible_gpus()) // cfg.model.tensor_parallel_size
        if not room:
            raise ConfigError(
                f"launcher=joblib: model.tensor_parallel_size={cfg.model.tensor_parallel_size}, and "
                f"{len(machine.visible_gpus())} GPUs can be seen"
            )
    return room if asked is None else min(asked, room)


def launch_here(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """Measure units side by side -> (unit, a point as JSON or how its worker ended), as they come. A crash ends nothing
    but one worker, which is a process; joblib's threads wait for them. Closing the iterator kills the workers."""
    from joblib import Parallel, delayed

    sent: queue.Queue[Sent] = queue.Queue()
    free: queue.Queue[str] = queue.Queue()
    for name in work.free(cfg):
        free.put(name)
    stop, turn = Event(), Lock()

    def one(unit: Unit) -> None:
        with turn:  # one waits at a time, so that a unit of many GPUs is not passed by
            mine = [free.get() for _ in range(unit.devices)]
        try:
            if stop.is_set():
                return
            # Between two points a supervisor has nothing to send, so it is asked to stop and not passed by.
            environment, document = work.environment(cfg, mine), description(unit, f"{run_id}{unit.name}")
            for item in points_of(document, environment, log(unit), stop.is_set):
                sent.put((unit, item))
        except Exception as error:  # of the supervisor itself, such as a full disk
            sent.put((unit, Ended(1, f"{type(error).__name__}: {error}")))
        finally:
            for name in mine:
                free.put(name)

    running = Thread(
        target=lambda: Parallel(n_jobs=workers_here(cfg), backend="threading")(delayed(one)(unit) for unit in units),
        daemon=True,
    )
    running.start()
    open_units = {unit.name for unit in units}
    try:
        while open_units:
            try:
                unit, item = sent.get(timeout=0.2)
            except queue.Empty:
                interrupts.check()
                continue
            if isinstance(item, Ended):
                open_units.discard(unit.name)
            yield unit, item
    finally:
        stop.set()
        running.join()


def ray_address() -> str | None:
    """Address of the Ray cluster to join, by Ray's own variable; None: one is started on this host."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_connected(cfg: RunConfig) -> Any:
    """The module `ray`, connected. Raises ConfigError: ray is not installed, or there is no cluster at that address."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would measure an engine behind all else on the host
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"launcher=ray: ray is not installed: {install('ray')}") from error
    if not ray.is_initialized():
        address = ray_address()
        local: dict[str, Any] = {}
        if not address:  # Ray starts a Python process for each processor, before any task
            cores = max(len(work.own_cores()), work.A_WORKER) if device_of(cfg) == "cpu" else workers_here(cfg)
            local = {"num_cpus": cores, "include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error
    return ray


def ray_workers(cfg: RunConfig) -> int:
    """Units at once on the cluster. Raises ConfigError: no node has what a worker takes; Ray would wait for ever."""
    if ray_address() is None:
        return workers_here(cfg)
    on_cpu = device_of(cfg) == "cpu"
    name, each = ("CPU", work.A_WORKER) if on_cpu else ("GPU", cfg.model.tensor_parallel_size)
    nodes = [int(node["Resources"].get(name, 0)) for node in ray_connected(cfg).nodes() if node["Alive"]]
    room = sum(have // each for have in nodes)
    if not room:
        raise ConfigError(
            f"RAY_ADDRESS={ray_address()}: a worker takes {each} {name}(s) of one node, and "
            f"no node of this Ray cluster has more than {max(nodes, default=0)}"
        )
    return room if cfg.launcher.workers is None else min(cfg.launcher.workers, room)


def launch_on_ray(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """As `launch_here`, each unit as a Ray task that streams its points. A lost node ends the units that it had."""
    ray = ray_connected(cfg)
    on_cpu = device_of(cfg) == "cpu"

    def streamed(document: dict[str, Any], log: str | None) -> Iterator[str | Ended]:
        own: dict[str, str] = {}
        if not on_cpu:  # as under joblib; Ray limits a task to the one thread of the one CPU that it asks for
            own = work.of_gpus(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
            os.environ.pop("OMP_NUM_THREADS", None)
        yield from points_of(document, own, log)

    remote = ray.remote(streamed)
    count = ray_workers(cfg)
    waiting, streams = list(units), dict[str, tuple[Unit, Any]]()
    try:
        while waiting or streams:
            while waiting and len(streams) < count:
                unit = waiting.pop(0)
                need = {"num_cpus": work.A_WORKER} if on_cpu else {"num_cpus": 1, "num_gpus": unit.gpus}
                task = remote.options(num_returns="streaming", max_retries=0, **need)
                place = log(unit) if ray_address() is None else None  # another node may not see that folder
                streams[unit.name] = unit, task.remote(description(unit, f"{run_id}{unit.name}"), place)
            interrupts.check()
            ready, _ = ray.wait([stream for _, stream in streams.values()], num_returns=1, timeout=0.5)
            for name, (unit, stream) in list(streams.items()):
                if stream not in ready:
                    continue
                try:
                    item = ray.get(next(stream))
                except (ray.exceptions.RayError, StopIteration) as error:
                    item = Ended(1, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                if isinstance(item, Ended):
                    del streams[name]
                yield unit, item
    finally:
        for _, stream in streams.values():
            ray.cancel(stream, force=False)
        if ray_address() is None:
            ray.shutdown()  # the cluster on this host was for this command


POLL = 0.5  # seconds
JOBS_AT_ONCE = 16  # of Slurm, where nothing is said
MINUTES = 240  # that a job may take; Slurm's own SBATCH_TIMELIMIT and SBATCH_PARTITION win


def on_slurm() -> bool:
    """Whether jobs can be submitted to Slurm here."""
    return shutil.which("srun") is not None


def job_workers(cfg: RunConfig) -> int:
    """How many jobs are submitted at once."""
    return cfg.launcher.workers or JOBS_AT_ONCE if on_slurm() else workers_here(cfg)


def job(document: dict[str, Any], spool: str, environment: dict[str, str], log: str) -> str:
    """Supervise a worker, and move its points to the shared spool -> how it ended, in words; empty: well."""
    ended = Ended(1, "the supervisor stopped")
    for number, item in enumerate(points_of(document, environment, log)):
        if isinstance(item, Ended):
            ended = item
            continue
        atomic_write(Path(spool) / f"{number:04d}.json", item)
    return "" if ended.code == 0 else str(ended)


def launch_jobs(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """As `launch_here`, each unit as a job."""
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
    free, count = None if on_slurm() else work.free(cfg), job_workers(cfg)
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
                    yield unit, _end_of_job(submitted)
            interrupts.check()
            time.sleep(POLL)
    finally:
        for _, _, submitted in running.values():
            submitted.cancel()


def _end_of_job(submitted: Any) -> Ended:
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
            record_folder.save(results, from_json(file.read_text(encoding="utf-8")))
        except record_folder.RecordError as error:
            if not isinstance(error.__cause__, FileExistsError):  # saved, and the driver died before it took it away
                raise
        file.unlink()
    return [f"{len(found)} point(s) that jobs of an earlier command had measured were taken in"] if found else []


class Launcher(NamedTuple):
    """How many units a launcher measures at once, and what measures units."""

    workers: Callable[[RunConfig], int]
    launch: Callable[[Sequence[Unit], RunConfig, str, Callable[[Unit], str]], Generator[Sent]]


LAUNCHERS = {
    "joblib": Launcher(workers_here, launch_here),
    "ray": Launcher(ray_workers, launch_on_ray),
    "submitit": Launcher(job_workers, launch_jobs),
}


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
    """Measure a plan on the workers of `cfg.launcher`; how many of its points were not begun. Raises ConfigError: no
    such launcher here, or reused baselines, which ran on one GPU. run_id: a unit's is this and its name, so that no two
    points share a name. folder: of results, and logs. save: writes a point. fail: a failed one. ends: see `Unit`."""
    launcher = _launcher(plan, cfg)
    units = cut(plan.families, launcher.workers(cfg), ends)
    finished: set[str] = set()
    deaths: Counter[str] = Counter()

    def died(unit: Unit, victim: Planned, ended: Ended) -> None:
        """Count a dead worker against the point in hand; after TRIES it has failed, and what needs it."""
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
