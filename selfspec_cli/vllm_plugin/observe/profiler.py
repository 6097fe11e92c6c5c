"""PyTorch's profiler in a worker's process, with named ranges around the parts of a round; and how busy a GPU was
between two moments, from NVML's own counters: two reads, and no thread that samples.

vLLM has a profiler too (`ProfilerConfig`, `LLM.start_profile`). It has to be asked for before the engine starts,
prints a table of every event when it stops, and only logs what goes wrong."""

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import DeviceType

from selfspec_cli.vllm_plugin import vllm_names as vllm

PREFIX = "selfspec."
MOST = 40  # kernels of a profile


def annotate(runner: Any, drafter: Any) -> list[str]:
    """Put ranges around the parts of a live engine; returns their names, each once. One that has ranges keeps them.
    verify, sample: the runner's two calls a step; logits: of the full model, wherever the runner asks for them. draft:
    all of the draft loop, and in it trunk, head and gate of a step; a captured loop replays as one launch and has none
    inside. schedule, and detokenise (stop strings and the making of outputs): where these are in this process."""
    places = [("verify", runner, "execute_model"), ("sample", runner, "sample_tokens"), ("draft", drafter, "propose")]
    places += [("logits", runner.get_model(), "compute_logits"), ("trunk", drafter, "_forward")]
    places.append(("head", getattr(drafter, "head", None), "logits"))
    # A V1 step takes its token and asks its gate in one method, a V2 step in one object of three kernels.
    places += [("gate", drafter, "_decide"), ("gate", drafter, "end_step")]
    methods = ("schedule", "update_from_output")
    places += [("schedule", kind, method) for kind in _schedulers() for method in methods if method in vars(kind)]
    places.append(("detokenise", vllm.OutputProcessor, "process_outputs"))
    existing = [(name, owner, method) for name, owner, method in places if hasattr(owner, method)]
    for name, owner, method in existing:
        function = getattr(owner, method)
        if not hasattr(function, "selfspec_range"):
            setattr(owner, method, _in_range(PREFIX + name, function))
    return list(dict.fromkeys(PREFIX + name for name, _, _ in existing))


def _schedulers() -> list[type]:
    """No worker knows the engine's scheduler, so the class that every scheduler is made of gets the ranges, and every
    subclass that overrides a method."""
    kinds = [vllm.Scheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    if hasattr(function, "__name__"):  # an object that is called has none
        ranged = functools.wraps(function)(ranged)
    ranged.selfspec_range = name  # type: ignore[attr-defined]
    return ranged


def start(device: torch.device) -> Any:
    """A profiler of PyTorch's that records until `stop`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


def stop(profiler: Any, device: torch.device, path: str | None) -> list[dict[str, Any]]:
    """End a recording and write its trace to `path`, if given, in Chrome's format. The MOST slowest kernels of a GPU,
    or operators of the CPU (each without those that it called): name, seconds, calls. Raises OSError."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    profiler.stop()
    if path is not None:
        profiler.export_chrome_trace(path)
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    kernels = [
        {
            "name": row.key[:200],
            "seconds": (row.self_cpu_time_total if kind == DeviceType.CPU else row.self_device_time_total) / 1e6,
            "calls": row.count,
        }
        for row in profiler.key_averages()
        if row.device_type == kind and not row.is_user_annotation and not row.key.startswith(PREFIX)
    ]
    return sorted(kernels, key=lambda kernel: -kernel["seconds"])[:MOST]


MIB = 2**20


class Meter:
    """Measures from its construction to `stop`. On the CPU, and where NVML refuses a figure, it has none to give."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml: Any = None
        self._samples: list[Any] = []
        if device.type != "cuda":
            return
        torch.cuda.reset_peak_memory_stats(device)
        with suppress(Exception):  # NVML may be missing, old, or closed to this user
            self._open()
            self._start = (time.perf_counter(), self._energy())
            self._samples.append(self._gpm_sample())

    def stop(self) -> dict[str, float]:
        """Share of busy SMs from 0 to 1 (sm_util), mean watts (power_w), and peak_mem_mib of this process's tensors."""
        if self.device.type != "cuda":
            return {}
        figures = {"peak_mem_mib": torch.cuda.max_memory_allocated(self.device) / MIB}
        with suppress(Exception):
            joules = (self._energy() - self._start[1]) / 1000
            figures["power_w"] = joules / (time.perf_counter() - self._start[0])
        with suppress(Exception):
            self._samples.append(self._gpm_sample())
            figures["sm_util"] = self._sm_util()
        for sample in self._samples:
            with suppress(Exception):
                self._nvml.nvmlGpmSampleFree(sample)
        return figures

    def _open(self) -> None:
        self._nvml = pynvml = vllm.pynvml
        pynvml.nvmlInit()
        # CUDA and NVML may number the cards differently; a UUID is the same to both.
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self._card = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def _energy(self) -> float:
        """Millijoules since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card))

    def _gpm_sample(self) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(self._card, sample)
        return sample

    def _sm_util(self) -> float:
        """Hopper's performance counter, averaged by NVML between the two samples."""
        nvml = self._nvml
        get = nvml.c_nvmlGpmMetricsGet_t()
        get.version, get.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        get.sample1, get.sample2 = self._samples
        get.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(get)
        return float(get.metrics[0].value) / 100
