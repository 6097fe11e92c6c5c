"""Workers on this host: one for each GPU, or on a CPU one for each idle pair of cores. joblib runs supervisors."""

import queue
from collections.abc import Callable, Generator, Sequence
from threading import Event, Lock, Thread

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.stages.launch import work
from selfspec_cli.stages.launch.work import Ended, Sent, Unit, description, points_of


def workers(cfg: RunConfig) -> int:
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


def launch(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
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
