"""The GPUs and the processor cores of this host, handed to workers so that no two of them share one."""

import os
from collections.abc import Sequence
from pathlib import Path

from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import RunConfig

CORES = "SELFSPEC_CORES"
"""Environment variable of a worker: the cores that it may use, separated by commas."""
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
    """Those of this process' cores that are on the side of the memory (the NUMA node) to which a GPU is attached; empty
    where nothing says or this process has none of them."""
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
