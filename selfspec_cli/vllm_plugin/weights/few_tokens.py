"""2 to 64 tokens times integer copies of weights: compiles and starts the kernel in few_tokens.cu.

The compiler is NVIDIA's NVRTC, which PyTorch brings on CUDA together with its Python bindings; no CUDA toolkit is
needed. One kernel is compiled for each width of the integers and each number of token tiles, in about a second.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.weights.lowbit import width_of

SOURCE = Path(__file__).with_suffix(".cu")
MOST = 64  # tokens
ENTRY = b"few_tokens"
THREADS_OF_WARP = 32
SPLITS = (1, 2, 4, 8)  # blocks of a cluster: 8 is what every device of capability 9.0 or later can start


class Shape(NamedTuple):
    """What a kernel is compiled for, named as in few_tokens.cu."""

    bits: int
    token_tiles: int
    warps: int
    row_tiles: int
    splits: int
    unit: int
    biased: bool

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 16 * self.row_tiles * self.warps

    def definitions(self) -> list[str]:
        """The compiler's options, `-DBITS=4` and so on."""
        return [f"-D{name.upper()}={int(value)}" for name, value in self._asdict().items()]


def shape_of(bits: int, tokens: int, rows: int, groups: int, processors: int, biased: bool) -> Shape:
    """The kernel for a product of `tokens` with a copy [rows, 64 * groups] on a GPU of so many multiprocessors.

    Columns are split among blocks until each multiprocessor has two, so long as a block keeps two units to read.
    """
    token_tiles = next(tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= tokens)
    unit = next(unit for unit in (4, 2, 1) if groups % unit == 0)
    shape = Shape(bits, token_tiles, warps=8, row_tiles=1, splits=1, unit=unit, biased=biased)
    for splits in SPLITS:
        if groups // unit < 2 * splits:
            break
        shape = shape._replace(splits=splits)
        if -(-rows // shape.rows) * splits >= 2 * processors:
            break
    return shape


def product(
    x: Tensor,
    words: Tensor,
    more: Tensor | None,
    scales: Tensor,
    bias: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """x [tokens, in] bf16 times a copy [out, in], plus bias [out] -> [tokens, out] bf16; at most 64 tokens.

    x is contiguous. shape: another kernel than `shape_of` says. Raises RuntimeError if CUDA does not do as it is told.
    """
    tokens, (rows, groups) = x.shape[0], scales.shape
    device = torch.cuda.get_device_properties(x.device)
    if shape is None:
        bits = width_of(words, more, x.shape[1])
        shape = shape_of(bits, tokens, rows, groups, device.multi_processor_count, bias is not None)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    kernel = _kernel(shape, f"sm_{device.major}{device.minor}", x.device.index)
    tensors = (x, words, words if more is None else more, scales, x if bias is None else bias, out)
    values = (*(tensor.data_ptr() for tensor in tensors), tokens, rows, groups)
    types = (*(ctypes.c_void_p for _ in tensors), ctypes.c_int, ctypes.c_int, ctypes.c_int)
    blocks, threads = -(-rows // shape.rows) * shape.splits, THREADS_OF_WARP * shape.warps
    stream = torch.cuda.current_stream(x.device).cuda_stream
    from cuda.bindings import driver

    _checked(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0))
    return out


def runs_on(device: torch.device) -> bool:
    """Whether this device has what the kernel uses (clusters of blocks, arithmetic with pairs of bf16)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _kernel(shape: Shape, architecture: str, device: int) -> Any:
    """The compiled kernel, loaded on the device with this number, which is the current one."""
    from cuda.bindings import driver

    (module,) = _checked(driver.cuModuleLoadData(compiled(shape, architecture)))
    (function,) = _checked(driver.cuModuleGetFunction(module, ENTRY))
    return function


def compiled(shape: Shape, architecture: str) -> bytes:
    """Machine code of the kernel. Needs no GPU. Raises RuntimeError with the compiler's words."""
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={architecture}", "--std=c++17", *shape.definitions()]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None))
    try:
        failure = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        if failure != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{SOURCE.name} with {' '.join(options)}: {log.decode(errors='replace')}")
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        code = b" " * size
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function of the bindings returned beside its error code. Raises RuntimeError for an error."""
    error, *values = result
    if error.value:
        raise RuntimeError(f"CUDA: {error.name}")
    return tuple(values)
