"""How busy a GPU was between two moments, from NVML's own counters: two reads, and no thread that samples."""

import time
from contextlib import suppress
from typing import Any

import torch

from selfspec_cli.vllm_plugin import vllm_names as vllm

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
