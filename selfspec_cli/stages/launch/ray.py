"""Workers on a Ray cluster: one that runs (RAY_ADDRESS), or one that is started on this host."""

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.extras import install
from selfspec_cli.stages.launch import joblib, work
from selfspec_cli.stages.launch.work import Ended, Sent, Unit, description, points_of


def running() -> str | None:
    """Address of the Ray cluster to join, by Ray's own variable; None: one is started on this host."""
    return os.environ.get("RAY_ADDRESS") or None


def connected(cfg: RunConfig) -> Any:
    """The module `ray`, connected. Raises ConfigError: ray is not installed, or there is no cluster at that address."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would measure an engine behind all else on the host
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"launcher=ray: ray is not installed: {install('ray')}") from error
    if not ray.is_initialized():
        address = running()
        local: dict[str, Any] = {}
        if not address:  # Ray starts a Python process for each processor, before any task
            cores = max(len(work.own_cores()), work.A_WORKER) if device_of(cfg) == "cpu" else joblib.workers(cfg)
            local = {"num_cpus": cores, "include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error
    return ray


def workers(cfg: RunConfig) -> int:
    """Units at once on the cluster. Raises ConfigError: no node has what a worker takes; Ray would wait for ever."""
    if running() is None:
        return joblib.workers(cfg)
    on_cpu = device_of(cfg) == "cpu"
    name, each = ("CPU", work.A_WORKER) if on_cpu else ("GPU", cfg.model.tensor_parallel_size)
    nodes = [int(node["Resources"].get(name, 0)) for node in connected(cfg).nodes() if node["Alive"]]
    room = sum(have // each for have in nodes)
    if not room:
        raise ConfigError(
            f"RAY_ADDRESS={running()}: a worker takes {each} {name}(s) of one node, and "
            f"no node of this Ray cluster has more than {max(nodes, default=0)}"
        )
    return room if cfg.launcher.workers is None else min(cfg.launcher.workers, room)


def launch(units: Sequence[Unit], cfg: RunConfig, run_id: str, log: Callable[[Unit], str]) -> Generator[Sent]:
    """As `joblib.launch`, each unit as a Ray task that streams its points. A lost node ends the units that it had."""
    ray = connected(cfg)
    on_cpu = device_of(cfg) == "cpu"

    def streamed(document: dict[str, Any], log: str | None) -> Iterator[str | Ended]:
        own: dict[str, str] = {}
        if not on_cpu:  # as under joblib; Ray limits a task to the one thread of the one CPU that it asks for
            own = work.of_gpus(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
            os.environ.pop("OMP_NUM_THREADS", None)
        yield from points_of(document, own, log)

    remote = ray.remote(streamed)
    count = workers(cfg)
    waiting, streams = list(units), dict[str, tuple[Unit, Any]]()
    try:
        while waiting or streams:
            while waiting and len(streams) < count:
                unit = waiting.pop(0)
                need = {"num_cpus": work.A_WORKER} if on_cpu else {"num_cpus": 1, "num_gpus": unit.gpus}
                task = remote.options(num_returns="streaming", max_retries=0, **need)
                place = log(unit) if running() is None else None  # another node may not see that folder
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
        if running() is None:
            ray.shutdown()  # the cluster on this host was for this command
