"""A draft loop that ends on the device, on several tensor-parallel ranks.

Every rank gathers the same logits, so each closes the same requests after the same step, and loops take the same steps
on all ranks. What ranks exchange in the loop's body has to be work that a conditional node of a CUDA graph may hold:
vLLM sums activations by a kernel of its own where GPUs reach each other's memory, but gathers logits through NCCL. In
draft steps its kernel gathers them. A small graph shows first whether the exchange works in a loop on this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.v2 import device_loop
from selfspec_cli.vllm_plugin.vllm_names import PyNcclCommunicator, get_tp_group, graph_capture

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
    """The parts of all ranks, joined along `dim`, as vLLM's communicator joins them; the kernel takes up to 2 MiB at
    once, so more rows are gathered in pieces. otherwise: what gathers along the rows, or rows that the kernel does not
    take."""
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


def reason_against_a_loop(loop: device_loop.DeviceLoop, device: torch.device) -> str | None:
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
    loop: device_loop.DeviceLoop,
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
    device_loop.wait("a loop in which tensor-parallel ranks exchange numbers")
    ranks = torch.arange(1.0, group.world_size + 1, device=device)
    good = bool((total == TURNS * ranks.sum()).all())
    good = good and torch.equal(joined.float()[0], ranks.repeat_interleave(WIDTH))
    return agreed(None if good else "a loop with their exchange in it gave wrong sums")
