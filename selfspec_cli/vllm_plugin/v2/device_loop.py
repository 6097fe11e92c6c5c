"""A loop inside a CUDA graph: `while (*flag) body`, decided on the device.

CUDA 12.4 has conditional graph nodes: a WHILE node holds a graph of its own and replays it for as long as a handle is
not zero; a kernel sets the handle (CUDA Programming Guide, "Conditional Graph Nodes"). PyTorch has no call for it yet,
so this module adds the node to the graph that PyTorch is capturing, and captures the body on a stream of its own.

Every tensor-parallel rank gathers the same logits, so loops take the same steps on all ranks. What ranks exchange in
the loop's body has to be work that a conditional node may hold: vLLM sums activations by a kernel of its own where GPUs
reach each other's memory, but gathers logits through NCCL. In draft steps its kernel gathers them. A small graph shows
first whether the exchange works in a loop on this machine."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.fused_step.launch import check
from selfspec_cli.vllm_plugin.vllm_names import PyNcclCommunicator, get_tp_group, graph_capture

# Declared here because NVRTC brings no header for it; the driver resolves the call when it loads the module.
_SET_CONDITION = rb"""
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void set_condition(unsigned long long handle, const int* flag) {
    cudaGraphSetConditional(handle, *flag > 0);
}
"""
_FIRST_VERSION = 12040  # of the driver, as cudaDriverGetVersion counts
SWITCH = "SELFSPEC_DEVICE_LOOP"
"""Environment variable: 0 captures k steps one after the other, where the loop is in doubt."""
PATIENCE = 30.0
"""Seconds that work of milliseconds may take, because other engines may use the GPU."""


def unavailable() -> str | None:
    """Why this machine cannot loop on the device; None if it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    try:
        from cuda.bindings import driver, nvrtc, runtime  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error})"
    version = check(runtime.cudaDriverGetVersion())
    if version < _FIRST_VERSION:
        return f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}; conditional graph nodes need 12.4"
    return None


def wait(what: str) -> None:
    """Until the device has done what was launched on the current stream. Raises RuntimeError, which names `what` that
    is, if it does not end: without that an engine would never start, and say nothing."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + PATIENCE
    while not done.query():
        if time.monotonic() > until:
            raise RuntimeError(
                f"{what} did not end within {PATIENCE:.0f} s on the device; {SWITCH}=0 captures k draft steps one "
                "after the other, in place of a loop that ends on the device"
            )
        time.sleep(0.0001)


class DeviceLoop:
    """Captures loops on one device. Graphs captured through it must not outlive it: it owns their bodies' memory.
    kept: tensors outside that memory that must live as long."""

    def __init__(self, device: torch.device) -> None:
        self.kept: list[Tensor] = []
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.MemPool()
        self._set_condition = _compile(device)

    def warm_up(self, body: Callable[[], None]) -> None:
        """Run `body` once on the stream that captures it: libraries then have their workspaces for that stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)

    def capture(self, flag: Tensor, body: Callable[[], None]) -> None:
        """Add `while (*flag > 0) body()` to the graph that the current stream is capturing.
        flag: int32 scalar on the device. body: launches work on the current stream; it must allocate through PyTorch
        alone and launch only kernels and copies on the device. Raises RuntimeError for any error of CUDA's."""
        from cuda.bindings import runtime as rt

        outer = torch.cuda.current_stream().cuda_stream
        _, _, graph, *_ = check(rt.cudaStreamGetCaptureInfo(outer))
        handle = check(rt.cudaGraphConditionalHandleCreate(graph, 0, 0))
        self._launch(handle, flag, outer)
        _, _, _, before, edges, count = check(rt.cudaStreamGetCaptureInfo(outer))
        node_params = rt.cudaGraphNodeParams()
        node_params.type = rt.cudaGraphNodeType.cudaGraphNodeTypeConditional
        node_params.conditional.handle = handle
        node_params.conditional.type = rt.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
        node_params.conditional.size = 1
        node = check(rt.cudaGraphAddNode(graph, before, edges, count, node_params))
        inside = node_params.conditional.phGraph_out[0]
        # The capture goes on behind the loop.
        replace = rt.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        check(rt.cudaStreamUpdateCaptureDependencies(outer, [node], None, 1, replace))
        inner = self._stream.cuda_stream
        relaxed = rt.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        # The capture of the body is another one than PyTorch's, whose memory pool would not know its allocations.
        with torch.cuda.use_mem_pool(self._pool), torch.cuda.stream(self._stream):
            check(rt.cudaStreamBeginCaptureToGraph(inner, inside, None, None, 0, relaxed))
            try:
                body()
                self._launch(handle, flag, inner)
            finally:
                check(rt.cudaStreamEndCapture(inner))

    def _launch(self, handle: Any, flag: Tensor, stream: int) -> None:
        from cuda.bindings import driver

        arguments = (int(handle), flag.data_ptr()), (ctypes.c_ulonglong, ctypes.c_void_p)
        check(driver.cuLaunchKernel(self._set_condition, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))


def _compile(device: torch.device) -> Any:
    """The kernel that sets a condition, built for `device`. Users have no nvcc, but PyTorch brings NVRTC."""
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    program = check(nvrtc.nvrtcCreateProgram(_SET_CONDITION, b"set_condition.cu", 0, None, None))
    option = f"--gpu-architecture=sm_{major}{minor}".encode()
    check(nvrtc.nvrtcCompileProgram(program, 1, [option]))
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    torch.cuda.current_stream(device).synchronize()  # a context must exist before a module is loaded into it
    module = check(driver.cuModuleLoadData(code))
    return check(driver.cuModuleGetFunction(module, b"set_condition"))


WIDTH, TURNS = 1024, 3  # of the trial: numbers that ranks exchange, and turns of its loop


def agreed(reason: str | None) -> str | None:
    """`reason`, or that another rank has one, or None where no rank has. Every rank must call it."""
    with torch.inference_mode(False):  # gloo's threads are not in that mode, and may not write to its tensors
        good = torch.tensor(int(reason is None), dtype=torch.int32)
        torch.distributed.all_reduce(good, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return None if good.item() else reason or "another rank cannot"


@contextmanager
def gathering_by_kernel() -> Iterator[None]:
    """Meanwhile tensor-parallel ranks gather by vLLM's kernel what it can take."""
    communicator = get_tp_group().device_communicator
    communicator.all_gather = partial(gathered, communicator, communicator.all_gather)
    try:
        yield
    finally:
        del communicator.all_gather  # the method of its class is there again


def gathered(communicator: Any, otherwise: Callable[..., Tensor], part: Tensor, dim: int = -1) -> Tensor:
    """The parts of all ranks, joined along `dim`, as vLLM's communicator joins them; more than the kernel's 2 MiB at
    once are gathered in pieces. otherwise: what gathers along the rows, or rows that the kernel does not take."""
    dim %= part.dim()
    kernel = communicator.ca_comm
    if dim == 0 or kernel is None or not kernel.should_custom_all_gather(part[:1]):
        return otherwise(part, dim)
    found = communicator.custom_all_gather(part)
    if found is None:
        pieces = part.split((len(part) + 1) // 2)
        return torch.cat([gathered(communicator, otherwise, piece, dim) for piece in pieces])
    found = found.reshape(-1, *part.shape).movedim(0, dim)
    return found.reshape(*part.shape[:dim], -1, *part.shape[dim + 1 :])


def reason_against_a_loop(loop: DeviceLoop, device: torch.device) -> str | None:
    """Why ranks cannot exchange anything inside a loop on the device; None if they can. Every rank must call it."""
    group = get_tp_group()
    kernel, row = group.device_communicator.ca_comm, torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device)
    if kernel is not None and kernel.should_custom_all_gather(row):
        return _tried(loop, group, group.all_reduce, group.all_gather, device)
    # What cannot be captured might leave a communicator unusable, so NCCL is tried on one of its own.
    own = PyNcclCommunicator(group.cpu_group, device)
    if own.disabled:
        return "ranks exchange activations by PyTorch alone"

    def gather(part: Tensor) -> Tensor:
        joined = part.new_empty(group.world_size, WIDTH)
        own.all_gather(joined, part)
        return joined.reshape(1, -1)

    try:
        reason = _tried(loop, group, own.all_reduce, gather, device)
    finally:
        own.destroy()
    return reason and f"ranks exchange activations through NCCL: {reason}"


def _tried(
    loop: DeviceLoop,
    group: Any,
    add: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor], Tensor],
    device: torch.device,
) -> str | None:
    """Capture and replay a loop of some turns in which ranks add and gather numbers; what was wrong, or None."""
    part = torch.full((1, WIDTH), 1.0 + group.rank_in_group, dtype=torch.bfloat16, device=device)
    loop.kept.append(part)  # the other ranks map its memory for good
    left = torch.zeros((), dtype=torch.int32, device=device)
    total, joined = torch.zeros_like(part), part.new_zeros(1, WIDTH * group.world_size)

    def body() -> None:
        total.add_(add(part))
        joined.copy_(gather(part))
        left.sub_(1)

    graph, reason = torch.cuda.CUDAGraph(), None
    try:
        with graph_capture(device=device) as context, gathering_by_kernel():
            loop.warm_up(body)
            with torch.cuda.graph(graph, stream=context.stream):
                loop.capture(left, body)
    except RuntimeError as error:
        reason = f"a loop with their exchange in it cannot be captured ({' '.join(str(error).split())[:160]})"
    if (reason := agreed(reason)) is not None:
        return reason
    total.zero_()
    left.fill_(TURNS)
    graph.replay()
    wait("a loop in which tensor-parallel ranks exchange numbers")
    ranks = torch.arange(1.0, group.world_size + 1, device=device)
    good = bool((total == TURNS * ranks.sum()).all())
    good = good and torch.equal(joined.float()[0], ranks.repeat_interleave(WIDTH))
    return agreed(None if good else "a loop with their exchange in it gave wrong sums")
