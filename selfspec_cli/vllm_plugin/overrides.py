"""How a subclass is made that overrides some methods of a class of vLLM's, and how it is named in an engine's
configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.refusals import require_runner

SUBCLASSES = "selfspec_cli.vllm_plugin.subclasses"
"""The module that vLLM finds our subclasses in. It imports what they override with, so it is not imported here."""
Methods = Mapping[str, Callable[[Any], Any]]
"""Name of a method -> function of ours that gets the base's method and returns what overrides it."""


def overriding(base: type, methods: Methods) -> type:
    """A subclass of `base` with other `methods`, and of vLLM's mixins of `base`, which vLLM looks for there."""
    members = {name: make(getattr(base, name)) for name, make in methods.items()}
    return type(f"EarlyExit{base.__name__}", (base, *base.__bases__[1:]), {**members, "__module__": SUBCLASSES})


def copied_as(kind: type, original: Any) -> Any:
    """An object of class `kind`, a subclass of the class of `original`, with the attributes of `original`."""
    copy: Any = object.__new__(kind)
    vars(copy).update(vars(original))
    return copy


WORKER, SCHEDULER = "worker_of:", "scheduler_of:"
USUAL_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
"""vLLM's worker for each kind of device that early exit runs on (refusals.py), as its platforms name it."""


def name_in(args: vllm.EngineArgs, parallel: vllm.ParallelConfig) -> None:
    """Name our worker and scheduler in the arguments, from which vLLM makes the scheduler's configuration later on, and
    in the configuration of an engine with early exit. Raises SettingsError for a device without it."""
    chosen = args.scheduler_cls
    if chosen is None:
        args.scheduler_cls = f"{SUBCLASSES}.scheduler"  # whether it is asynchronous is not decided yet
    elif not str(chosen).startswith(SUBCLASSES):
        args.scheduler_cls = subclass_of(chosen, SCHEDULER)
    if parallel.worker_cls == "auto":
        device = str(vllm.current_platform.device_type)
        require_runner(device, None)
        parallel.worker_cls = subclass_of(USUAL_WORKERS[device], WORKER)
    elif not parallel.worker_cls.startswith(SUBCLASSES):
        parallel.worker_cls = subclass_of(parallel.worker_cls, WORKER)


def subclass_of(base: Any, kind: str) -> str:
    """The dotted name of our subclass of `base`, a class or its dotted name. kind: `WORKER` or `SCHEDULER`.
    vLLM splits a name at its last dot, so that of the base has none."""
    dotted = base if isinstance(base, str) else f"{base.__module__}.{base.__qualname__}"
    module, _, name = dotted.rpartition(".")
    return f"{SUBCLASSES}.{kind}{module.replace('.', '/')}:{name}"
