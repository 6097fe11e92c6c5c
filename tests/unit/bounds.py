"""Triton's interpreter, as strict as a device: an address outside of the tensors that a kernel was given is an error,
and where a load does not say what to take in place of what its mask leaves out, that is not zero but anything."""

from typing import Any

import numpy as np
import torch
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from selfspec_cli.vllm_plugin.interpreted import launch_quickly


def tensors(arguments: Any) -> list[torch.Tensor]:
    """The tensors among a kernel's arguments, in tuples too."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    return [found for one in arguments for found in tensors(one)] if isinstance(arguments, (list, tuple)) else []


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor that is not empty, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


load = TritonSemantic.load


def load_anything(self: TritonSemantic, pointer: Any, mask: Any, other: Any, *more: Any) -> Any:
    """A load of which what the mask leaves out is NaN, or an integer that no test expects, unless it says otherwise."""
    if mask is not None and other is None:
        other = self.to_tensor(float("nan") if pointer.dtype.scalar.element_ty.is_floating() else 127)
    return load(self, pointer, mask, other, *more)


def watch() -> None:
    """From now on, for every kernel of this process."""
    starts = ends = np.zeros(0, np.uint64)
    arguments_of = GridExecutor._init_args_hst

    def started(self: GridExecutor, *given: Any) -> Any:
        nonlocal starts, ends
        arguments, named = arguments_of(self, *given)
        used = sorted(extent(one) for one in tensors([*arguments, *named.values()]) if one.numel())
        starts, ends = np.array(used, np.uint64).reshape(-1, 2).T
        ends = np.maximum.accumulate(ends)  # a tensor may lie in another one
        return arguments, named

    def watched(name: str, pointers: int, mask: int) -> None:
        access = getattr(InterpreterBuilder, name)

        def checked(self: InterpreterBuilder, *given: Any) -> Any:
            used = given[pointers].data[given[mask].data]
            before = np.searchsorted(starts, used, side="right")
            if not (before.all() and (used < ends[before - 1]).all()):
                raise IndexError(f"{name} outside of the kernel's tensors")
            return access(self, *given)

        setattr(InterpreterBuilder, name, checked)

    GridExecutor._init_args_hst, TritonSemantic.load = started, load_anything
    watched("create_masked_load", 0, 1)
    watched("create_masked_store", 0, 2)
    watched("create_atomic_rmw", 1, 3)


def pytest_configure() -> None:
    """As a plugin of pytest: kernels are launched quickly."""
    launch_quickly()
