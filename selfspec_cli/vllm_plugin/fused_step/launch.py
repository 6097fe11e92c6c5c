"""Compiles the kernel for a whole trunk (exchange.cu begins it) with NVRTC, which PyTorch brings, and launches it."""

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.fused_step.layout import PHASES, RECORD, Plan, Shape, round_up
from selfspec_cli.vllm_plugin.fused_step.wide import layout as wide
from selfspec_cli.whole import written

NAME = b"draft_trunk"
PARTS = (
    "ptx.cu",
    "shape.cu",
    "exchange.cu",
    "weights.cu",
    "tokens.cu",
    "parts.cu",
    "keys.cu",
    "attention.cu",
    "trunk.cu",
)
"""Of one source."""
SPLITS = 64  # most parts that the keys of a request are split into
FEWEST_SLOTS = 3  # chunks of a warp's ring
RECORDS = (4, 2)  # of a copy into shared memory, tried in order; a strip's of a group are one copy or several
SHARED_AREA = 3  # tokens from which a phase's sums lie where the next one's bytes will be
PADDED = 4  # most tokens whose sums have a gap from tile to tile; more need the room for weights
DIRECT = (8, 4, 2)  # most of them that readers add up themselves, with one token, two, ...


@dataclass(frozen=True)
class Build:
    """One number of tokens. at_once: records of a copy; slots: such copies that a warp's ring has room for."""

    shape: Shape
    plan: Plan
    tokens: int
    at_once: int
    slots: int

    name: ClassVar[bytes] = NAME
    parts: ClassVar[tuple[str, ...]] = PARTS

    @property
    def grid(self) -> int:
        return len(self.plan.blocks)

    @property
    def threads(self) -> int:
        return self.plan.warps * 32

    def memory(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors of the kernel's own, by the names of its arguments."""
        words = torch.zeros(self.words, dtype=torch.int64, device=device)
        return {"words": words, "launches": torch.ones(1, dtype=torch.int32, device=device)}

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
        shape, plan = self.shape, self.plan
        direct = min(DIRECT[min(self.tokens, len(DIRECT)) - 1], self.splits)
        values = {
            **shape.options,
            "NT": self.tokens,
            "SHARED_AREA": int(shares_area(self.tokens)),
            "WARPS": plan.warps,
            "NB": len(plan.blocks),
            "TILES": plan.most_tiles,
            "ROWS": plan.most_rows,
            "RECORDS": self.at_once,
            "SLOTS": self.slots,
            "CHUNKS": chunks(shape, plan, self.at_once),
            "DIRECT": direct,
            "PADDED": int(pads_sums(self.tokens)),
            "SHARED": self.shared_bytes,
            "WORDS": self.words,
        }
        return [f"-D{name}={value}" for name, value in values.items()]

    @property
    def shared_bytes(self) -> int:
        rings = self.slots * self.plan.warps * (self.at_once * RECORD + 8)
        return rings + fixed_bytes(self.shape, self.plan, self.tokens, self.at_once)


def chunks(shape: Shape, plan: Plan, at_once: int) -> int:
    """Most chunks of a warp in a layer."""
    most = {name: -(-groups // plan.warps) for name, groups in shape.groups.items()}  # groups of a warp

    def of(tiles: int, name: str) -> int:
        return tiles * -(-most[name] // at_once)

    return max(
        of(q, "qkv") + of(rows, "o") + of(rows, "down") + g // at_once * most["gate_up"]
        for _, q, _, rows, _, g in plan.blocks
    )


def shares_area(tokens: int) -> bool:
    """Whether a phase's sums lie where the next phase's bytes will be."""
    return tokens >= SHARED_AREA


def pads_sums(tokens: int) -> bool:
    """Whether the sums of a tile are followed by a gap, so that lanes that read four tiles find different banks."""
    return tokens <= PADDED


def fixed_bytes(shape: Shape, plan: Plan, tokens: int, at_once: int) -> int:
    """Shared memory of a block beside the warps' rings; exchange.cu lays it out."""
    groups, even = shape.groups, tokens if tokens == 1 else -(-tokens // 2) * 2
    most, short = (-(-max(groups[name] for name in names) // plan.warps) for names in (PHASES, ("qkv", "o")))
    tile = (tokens if tokens <= 4 else even) * 64 + pads_sums(tokens) * 32  # bytes of the sums of a tile
    rows = plan.most_rows * tile
    if shares_area(tokens):
        area = max(even * 64 * short + plan.most_tiles * tile, even * 64 * most + rows)
    else:
        area = even * 64 * most + plan.most_tiles * tile + rows
    attention = plan.warps * (shape.query_heads // shape.heads) * (shape.dim + 2) * 4
    areas, factors = round_up(max(plan.warps * area, attention), 16), plan.warps * most * even * 8
    residual = round_up(plan.most_rows * 16 * tokens * 4, 16)
    queries, places, planned = 8 * (shape.dim + 8) * 2 + 2 * shape.dim * 2, plan.warps * 8 * 8, 48
    per_token = plan.warps * 4 + shape.dim * 4 + 4
    listed = plan.warps * chunks(shape, plan, at_once) * 4
    return areas + round_up(factors, 16) + tokens * per_token + residual + queries + places + planned + listed


def built(shape: Shape, plan: Plan, tokens: int, shared: int) -> Build:
    """With the largest copies into shared memory of which `shared` bytes have room for FEWEST_SLOTS.
    Raises ValueError where there is no room, or where a block would have to attend to more than one head."""
    if tokens * shape.heads > len(plan.blocks):
        raise ValueError(f"{tokens} tokens of {shape.heads} KV heads are more than {len(plan.blocks)} multiprocessors")
    for at_once in RECORDS:
        room = shared - fixed_bytes(shape, plan, tokens, at_once)
        slots = room // (plan.warps * (at_once * RECORD + 8))
        if slots >= FEWEST_SLOTS:
            return Build(shape, plan, tokens, at_once, slots)
    raise ValueError(f"{shared} bytes of shared memory have no room for the weights of {tokens} tokens")


WEIGHTS = "weights norms bias head_norms final_norm embedding rope caches"
INPUTS = "ids positions lengths slots table out"


def _fields(pointers: str) -> list[tuple[str, Any]]:
    """Of a structure: pointers, and the strides of the KV cache and of its table."""
    strides = "cache_block cache_head cache_token cache_value table_row"
    return [(name, kind) for names, kind in ((pointers, c_void_p), (strides, c_longlong)) for name in names.split()]


class Arguments(ctypes.Structure):
    """`struct Arguments` of exchange.cu."""

    _fields_ = [*_fields(f"{WEIGHTS} plan words launches {INPUTS}"), ("scale", c_float)]


class WideArguments(ctypes.Structure):
    """`struct Arguments` of wide/memory.cu."""

    _fields_ = [*_fields(f"{WEIGHTS} memory stamps {INPUTS}"), ("tokens", c_int), ("scale", c_float)]


class Kernel:
    """A build on one device. folder: where compiled code is kept, if anywhere; a start that finds it compiles nothing.
    Raises RuntimeError for any error of CUDA's."""

    def __init__(
        self,
        build: Build | wide.Build,
        device: torch.device,
        folder: Path | None = None,
        more_options: Sequence[str] = (),
    ) -> None:
        from cuda.bindings import driver

        self.build = build
        code = _compiled(device, build.parts, [*build.options, *more_options], folder)
        torch.cuda.current_stream(device).synchronize()  # a context must exist before a module is loaded into it
        self._module = check(driver.cuModuleLoadData(code))
        self._function = check(driver.cuModuleGetFunction(self._module, build.name))
        attributes = driver.CUfunction_attribute
        most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, most, build.shared_bytes))
        local = attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        self.spilled = int(check(driver.cuFuncGetAttribute(local, self._function)))  # bytes of a thread; costs dearly
        self.memory = build.memory(device)

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Launch it on the current stream. All blocks must run at a time, so it is a cooperative launch."""
        from cuda.bindings import driver

        for name, tensor in self.memory.items():
            setattr(arguments, name, tensor.data_ptr())
        values = (c_void_p * 1)(ctypes.addressof(arguments))
        stream, shared = torch.cuda.current_stream().cuda_stream, self.build.shared_bytes
        sizes = (self.build.grid, 1, 1, self.build.threads, 1, 1, shared, stream)
        check(driver.cuLaunchCooperativeKernel(self._function, *sizes, ctypes.addressof(values)))


def _compiled(device: torch.device, parts: Sequence[str], options: Sequence[str], folder: Path | None) -> bytes:
    """Machine code of a source's parts for a device, from `folder` or by NVRTC."""
    from cuda.bindings import nvrtc

    folder_of_parts = files("selfspec_cli.vllm_plugin.fused_step")
    source = b"".join((folder_of_parts / part).read_bytes() for part in parts)
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", "-default-device", *options]
    version = check(nvrtc.nvrtcVersion())
    key = hashlib.sha256(b"\0".join([source, repr((version, options)).encode()])).hexdigest()
    kept = None if folder is None else folder / f"draft_trunk_{key[:24]}.cubin"
    if kept is not None and kept.exists():
        return kept.read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"trunk.cu", 0, None, None))
    status = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
    if int(status[0]):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {log.decode(errors='replace')}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    if kept is not None:
        with written(kept) as part:
            part.write_bytes(code)
    return code


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def check(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-bindings returned, without its status. Raises RuntimeError for any but success."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else tuple(values)
