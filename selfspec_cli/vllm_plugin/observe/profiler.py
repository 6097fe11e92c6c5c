"""PyTorch's profiler in a worker's process, and what of the engine has to be known to understand a trace.

vLLM has a profiler too (`ProfilerConfig`, `LLM.start_profile`). It has to be asked for before the engine starts,
prints a table of every event when it stops, and only logs what goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.decoder import has_experts, layers_of, output_projection
from selfspec_cli.vllm_plugin.vllm_names import LinearBase
from selfspec_cli.vllm_plugin.weights.step_bytes import read_bytes


class Profiler:
    """Records from its construction to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self, path: str | None) -> None:
        """Write the trace to `path`, in Chrome's format; a name that ends in .gz is packed.

        Raises:
            OSError: it cannot be written.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.stop()
        if path is not None:
            self._profile.export_chrome_trace(path)


class NsightWindow:
    """What `nsys profile --capture-range=cudaProfilerApi` records: from its construction to `stop`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def stop(self, path: str | None) -> None:
        """End it; Nsight Systems writes its own file, so `path` is not used."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def weights_in_order(target: nn.Module, drafter: Any) -> dict[str, list[int]] | None:
    """Bytes of the weight of each product with a matrix, in the order of a full pass (`full`) and of a draft step.

    vLLM's decoders register a layer's linear modules in the order in which they run; the lm_head comes last. None for a
    mixture of experts, whose step reads some of its weights, and for a decoder that is not known.
    """
    try:
        layers = layers_of(target)
    except SettingsError:
        return None
    if any(map(has_experts, layers)):
        return None
    names = [name for name, part in layers[0].named_modules() if isinstance(part, LinearBase)]
    found = {"full": [*_linears(layers, names), read_bytes([output_projection(target)])]}
    head = getattr(drafter, "head", None)
    if head is not None and hasattr(head, "reads_lm_head"):
        trunk = drafter.model
        rows = read_bytes([output_projection(target)] if head.reads_lm_head else [], head.tensors)
        found["draft"] = [*_linears(trunk.drafting_layers, names), rows]
    return found


def _linears(layers: Iterable[nn.Module], names: Sequence[str]) -> list[int]:
    """A layer that drafts on copies has them under the names of what they were made of."""
    return [read_bytes([layer.get_submodule(name)]) for layer in layers for name in names]


def memory_rate(device: torch.device) -> float | None:
    """Bytes a second that the memory of a GPU can move at most, by its clock and width; None where nothing says."""
    if device.type != "cuda":
        return None
    with suppress(Exception):  # an old Triton, or a driver that does not tell
        from triton.testing import get_dram_gbps

        return float(get_dram_gbps(torch.cuda.current_device())) * 1e9
    return None
