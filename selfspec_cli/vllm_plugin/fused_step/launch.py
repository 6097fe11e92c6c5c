"""Compiles the kernel for a whole trunk (trunk.cu) with NVRTC, which PyTorch brings, and launches it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.fused_step.layout import RECORD, Plan, Shape, share

NAME = b"draft_trunk"
SPLITS = 64  # most parts that the keys of a request are split into
DIRECT = 8  # most of them that readers add up themselves, with one token
RESERVED = 1024  # bytes of shared memory that CUDA keeps of each block's


@dataclass(frozen=True)
class Build:
    """One number of tokens. at_once: records of a copy; slots: such copies that a warp's ring has room for."""

    shape: Shape
    plan: Plan
    tokens: int
    at_once: int
    slots: int

    @property
    def splits(self) -> int:
        """Parts that the keys of a request can be split into."""
        return min(SPLITS, max(1, len(self.plan.blocks) // (self.tokens * self.shape.heads)))

    @property
    def words(self) -> int:
        """Words of 64 bits through which blocks exchange activations."""
        shape, n = self.shape, self.tokens
        attended = shape.query_heads * shape.dim
        parts = n * self.splits * attended // 2 + -(-n * self.splits * shape.query_heads // 2) * 2
        gated = n * (shape.intermediate // 4 + shape.intermediate // 32)
        return n * (2 * shape.hidden + shape.qkv + attended) // 2 + gated + parts

    @property
    def options(self) -> list[str]:
        """What trunk.cu is compiled with."""
        shape, plan = self.shape, self.plan
        values = {
            "LAYERS": shape.layers, "HIDDEN": shape.hidden, "INTER": shape.intermediate, "QH": shape.query_heads,
            "KVH": shape.heads, "DIM": shape.dim, "NT": self.tokens, "WARPS": plan.warps, "NB": len(plan.blocks),
            "RECORDS": self.at_once, "SLOTS": self.slots, "CHUNKS": chunks(shape, plan, self.at_once), "TILES": plan.most_tiles, "ROWS": plan.most_rows,
            "PAGE": shape.page, "BIAS": int(shape.bias), "QKNORM": int(shape.head_norms),
            "ROPE_FLOAT": int(shape.rope_float), "EPSILON": f"{shape.epsilon!r}f",
            "DIRECT": min(DIRECT, self.splits) if self.tokens == 1 else 1,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in values.items()]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; trunk.cu counts the same."""
        rings = self.slots * self.plan.warps * (self.at_once * RECORD + 8)
        return rings + fixed_bytes(self.shape, self.plan, self.tokens, self.at_once)


def chunks(shape: Shape, plan: Plan, at_once: int) -> int:
    """Most chunks of a warp in a layer."""

    def of(tiles: int, groups: int) -> int:
        shares = {len(share(groups, warp, plan.warps)) for warp in range(plan.warps)}
        return max(-(-tiles // (at_once // n)) if n <= at_once else tiles * -(-n // at_once) for n in shares)

    groups = shape.groups
    return max(of(q, groups["qkv"]) + of(rows, groups["o"]) + of(rows, groups["down"]) + of(g, groups["gate_up"])
               for _, q, _, rows, _, g in plan.blocks)  # fmt: skip


def fixed_bytes(shape: Shape, plan: Plan, tokens: int, at_once: int) -> int:
    """Shared memory of a block beside the warps' rings."""
    most = -(-max(shape.groups.values()) // plan.warps)
    gemv = plan.warps * (plan.most_tiles + plan.most_rows) * tokens * 16 * 4
    attention = plan.warps * (shape.query_heads // shape.heads) * (shape.dim + 2) * 4
    sums = -(-max(gemv, attention) // 16) * 16
    residual = -(-plan.most_rows * 16 * tokens * 4 // 16) * 16
    queries = 8 * (shape.dim + 8) * 2 + 2 * shape.dim * 2
    return (
        plan.warps * most * tokens * (64 + 8) + sums + plan.warps * tokens * 4 + residual + queries + tokens * shape.dim * 4
        + plan.warps * chunks(shape, plan, at_once) * 2
    )  # fmt: skip


def built(shape: Shape, plan: Plan, tokens: int, at_once: int, shared: int) -> Build:
    """With as many slots as `shared` bytes of shared memory have room for. Raises ValueError where that is under two."""
    room = shared - RESERVED - fixed_bytes(shape, plan, tokens, at_once)
    slots = room // (plan.warps * (at_once * RECORD + 8))
    if slots < 2:
        raise ValueError(f"{shared} bytes of shared memory have no room for the weights of {tokens} tokens")
    return Build(shape, plan, tokens, at_once, slots)


class Arguments(ctypes.Structure):
    """`struct Arguments` of trunk.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "stream", "offsets", "plan", "norms", "bias", "head_norms", "final_norm", "embedding", "rope", "caches",
            "words", "launches", "ids", "positions", "lengths", "slots", "table", "out")),
        *((name, ctypes.c_longlong) for name in (
            "cache_block", "cache_head", "cache_token", "cache_value", "table_row")),
        ("profile", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Kernel:
    """A build on one device."""

    def __init__(self, build: Build, device: torch.device, more_options: Sequence[str] = ()) -> None:
        from cuda.bindings import driver, nvrtc

        self.build = build
        source = (files("selfspec_cli.vllm_plugin.fused_step") / "trunk.cu").read_bytes()
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", "-default-device", *build.options,
                   *more_options]  # fmt: skip
        program = check(nvrtc.nvrtcCreateProgram(source, b"trunk.cu", 0, None, None))
        status = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
        if int(status[0]):
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.decode(errors='replace')}")
        code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, code))
        torch.cuda.current_stream(device).synchronize()  # a context must exist before a module is loaded into it
        self._module = check(driver.cuModuleLoadData(code))
        self._function = check(driver.cuModuleGetFunction(self._module, NAME))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, attribute, build.shared_bytes))
        self.words = torch.zeros(build.words, dtype=torch.int64, device=device)
        self.launches = torch.ones(1, dtype=torch.int32, device=device)

    def __call__(self, arguments: Arguments, cooperative: bool = True) -> None:
        """Launch it on the current stream."""
        from cuda.bindings import driver

        arguments.words, arguments.launches = self.words.data_ptr(), self.launches.data_ptr()
        values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        grid, threads = len(self.build.plan.blocks), self.build.plan.warps * 32
        launch = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        stream = torch.cuda.current_stream().cuda_stream
        more = () if cooperative else (0,)
        check(launch(self._function, grid, 1, 1, threads, 1, 1, self.build.shared_bytes, stream,
                     ctypes.addressof(values), *more))  # fmt: skip


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def check(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-bindings returned, without its status. Raises RuntimeError for any but success."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else tuple(values)
