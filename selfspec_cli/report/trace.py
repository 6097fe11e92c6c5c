"""Where the time of a round goes, from a trace of PyTorch's profiler with selfspec's ranges in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
OUTSIDE = "other"


@dataclass
class Share:
    """What one part of a round costs, in microseconds of GPU time a round."""

    part: str
    busy: float  # kernels and copies launched from this part
    launches: float  # of kernels, copies and graphs, a round


def shares(events: Sequence[dict[str, Any]], prefix: str = "selfspec.") -> tuple[list[Share], float, int]:
    """(what each part costs, wall microseconds a round, rounds) of a chrome trace's events.

    A kernel belongs to the innermost range that its launch lies in; kernels of one graph share the graph's launch.
    What is left of the wall time is "idle": nothing ran on the GPU.
    """
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(prefix))
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name", "").startswith(prefix)
    )
    begins = [begin for begin, _, _ in ranges]
    launched = {
        event["args"]["correlation"]: _innermost(event["ts"], ranges, begins)
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in GPU_WORK]
    rounds = sum(name == "verify" for _, _, name in ranges)
    if not work or not rounds:
        raise ValueError("the trace has no GPU work, or no range of a verify pass")
    busy: dict[str, float] = {}
    calls: dict[str, set[int]] = {}
    for event in work:
        correlation = event["args"].get("correlation", -1)
        part = launched.get(correlation, OUTSIDE)
        busy[part] = busy.get(part, 0.0) + event["dur"]
        calls.setdefault(part, set()).add(correlation)
    wall = max(event["ts"] + event["dur"] for event in work) - min(event["ts"] for event in work)
    found = [Share(part, busy[part] / rounds, len(calls[part]) / rounds) for part in sorted(busy)]
    return [*found, Share("idle", (wall - _covered(work)) / rounds, 0.0)], wall / rounds, rounds


def _innermost(ts: float, ranges: Sequence[tuple[float, float, str]], begins: Sequence[float]) -> str:
    """The range that began last among those that hold `ts`; ranges nest a few deep at most."""
    at = bisect_right(begins, ts)
    for begin, end, name in reversed(ranges[max(0, at - 8) : at]):
        if begin <= ts <= end:
            return name
    return OUTSIDE


def _covered(work: Sequence[dict[str, Any]]) -> float:
    """Microseconds in which at least one piece of work ran; streams may overlap."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in work):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
