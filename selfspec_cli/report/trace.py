"""Where the time of a round goes, from a trace of PyTorch's profiler with selfspec's ranges in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (of `busy`, times a round)


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
    parts: dict[str, list[dict[str, Any]]] = {}
    for event in work:
        parts.setdefault(launched.get(event["args"].get("correlation", -1), OUTSIDE), []).append(event)
    wall = max(event["ts"] + event["dur"] for event in work) - min(event["ts"] for event in work)
    found = [_share(part, parts[part], rounds) for part in sorted(parts)]
    return [*found, Share("idle", (wall - _covered(work)) / rounds, 0.0)], wall / rounds, rounds


def _share(part: str, work: Sequence[dict[str, Any]], rounds: int) -> Share:
    calls = {event["args"].get("correlation", -1) for event in work}
    kernels: dict[str, tuple[float, float]] = {}
    for event in work:
        busy, times = kernels.get(event["name"], (0.0, 0.0))
        kernels[event["name"]] = (busy + event["dur"] / rounds, times + 1 / rounds)
    slowest_first = dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
    return Share(part, sum(event["dur"] for event in work) / rounds, len(calls) / rounds, slowest_first)


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
