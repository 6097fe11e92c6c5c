"""Workers on this host: one for each GPU, or on a CPU one for each idle pair of cores. joblib runs supervisors."""

import os
import queue
from collections.abc import Callable, Generator, Sequence
from threading import Event, Thread

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.stages.launch import devices
from selfspec_cli.stages.launch.supervise import Ended, points_of
from selfspec_cli.stages.launch.units import Unit, description

Sent = tuple[Unit, str | Ended]


def workers(cfg: RunConfig) -> int:
    """How many units this host can measure at once."""
    asked = cfg.launcher.workers
    if device_of(cfg) == "cpu":
        room = len(idle_pairs())
    else:
        room = len(machine.visible_gpus()) // cfg.model.tensor_parallel_size
        if not room:
            raise ConfigError(
                f"launcher=joblib: model.tensor_parallel_size={cfg.model.tensor_parallel_size}, and "
                f"{len(machine.visible_gpus())} GPUs can be seen"
            )
    return room if asked is None else min(asked, room)


def idle_pairs() -> list[list[int]]:
    """The cores of this process in pairs, as many as are idle."""
    return devices.free_pairs(devices.own_cores(), os.getloadavg()[0])


def launch(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """Measure units side by side -> (unit, a point as JSON or how its worker ended), as they come.

    A worker is a process of its own, so a crash ends nothing but that worker; the pool that joblib keeps is of threads,
    each of which waits for one. Closing the iterator kills the workers.
    """
    from joblib import Parallel, delayed

    on_cpu = device_of(cfg) == "cpu"
    pairs = idle_pairs()
    gpus = devices.gpu_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), len(machine.gpus()))
    pool = devices.Devices(range(len(pairs) if on_cpu else len(gpus)))
    sent: queue.Queue[Sent] = queue.Queue()
    stop = Event()

    def one(unit: Unit) -> None:
        try:
            with pool.taken(1 if on_cpu else unit.gpus) as mine:
                if stop.is_set():
                    return
                environment = of_cores(pairs[mine[0]]) if on_cpu else devices.of_gpus([gpus[number] for number in mine])
                # Between two points a supervisor has nothing to send, so it is asked to stop and not passed by.
                for item in points_of(description(unit, f"{run_id}{unit.name}"), environment, log(unit), stop.is_set):
                    sent.put((unit, item))
        except Exception as error:  # of the supervisor itself, such as a full disk
            sent.put((unit, Ended(1, f"{type(error).__name__}: {error}")))

    running = Thread(
        target=lambda: Parallel(n_jobs=workers(cfg), backend="threading")(delayed(one)(unit) for unit in units),
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


def of_cores(cores: Sequence[object]) -> dict[str, str]:
    """Environment variables of a worker that has these cores."""
    return {devices.CORES: ",".join(map(str, cores)), "OMP_NUM_THREADS": str(len(cores))}
