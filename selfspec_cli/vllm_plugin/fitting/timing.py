"""How long a small piece of device work takes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CALLS, REPEATS = 20, 5


@torch.inference_mode()
def seconds_a_call(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call of `work` over repeats of 20 calls, after a warm-up.

    On CUDA the calls are replayed as one CUDA graph, as a draft loop is, and timed by events: what the host needs to
    launch them is not in it.
    """
    for _ in range(3):
        work()
    if device.type == "cuda":
        return _replayed(work)
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        samples.append((time.perf_counter() - start) / CALLS)
    return statistics.median(samples)


def _replayed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    samples = []
    for _ in range(REPEATS + 1):  # the first replay uploads the graph
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(samples[1:])
