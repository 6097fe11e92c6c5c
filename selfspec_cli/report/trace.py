"""Where the time of a run goes, from traces of PyTorch's profiler with selfspec's ranges in them.

Every moment of the run belongs to one part. On a GPU it is that of the kernel that runs; while none runs, the moment
belongs to the scheduler or to detokenisation if the host is at that, to `host` if the host is at any other part, and is
`idle` else. On the CPU it is the innermost range that the host is in.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
PREFIX = "selfspec."
PART_OF = {
    "trunk": "trunk",
    "head": "head",
    "gate": "gate",
    "draft": "draft",
    "verify": "verify",
    "logits": "verify",
    "sample": "sampler",
    "schedule": "scheduler",
    "detokenise": "detokenise",
    "step": "other",
}
"""The part that each range belongs to."""
HOST, IDLE, OTHER = "host", "idle", "other"
PARTS = {
    "trunk": "the layers that draft",
    "head": "the exit head",
    "gate": "taking a draft token, and asking the gate",
    "draft": "the rest of drafting",
    "verify": "the full model: verify passes and prefill",
    "sampler": "sampling, and accepting or rejecting drafts",
    "scheduler": "vLLM's scheduler",
    "detokenise": "text of the tokens, and making outputs",
    OTHER: "the rest of an engine step",
    HOST: "the GPU waits for the host inside the other parts",
    IDLE: "nothing of the above",
}
PRODUCT = re.compile(
    r"nvjet|gemm|gemv|xmma|marlin|machete|onednn|(?:^|[:_.])(?:add)?b?mm$|_linear$|linear_(?:pointwise|unary)",
    re.IGNORECASE,
)
"""Names of kernels and operators that multiply by a weight."""
NO_PRODUCT = re.compile(r"splitkreduce|flash|attn|attention|quant_|^triton_(?:poi|red|per)_", re.IGNORECASE)
"""Names among them that do not; Inductor names a kernel after what stands around it too."""
DRAFTING = ("trunk", "head", "gate", "draft")
"""The parts of a draft step."""
UNSEEN_LAUNCHES = {"draft_trunk": "trunk"}
"""Kernels that are launched by a call that PyTorch's profiler does not record (cuLaunchCooperativeKernel), and their
parts in a trace in which kernels were launched one by one."""

PASSES = (("full", "full passes", ("verify",)), ("draft", "draft steps", ("trunk", "head")))
"""Which weights are read in which parts."""

ROUNDS_AHEAD = 2  # that asynchronous scheduling may have begun when the last token is out

Interval = tuple[float, float, str]
"""Begin and end in microseconds, and a part."""


@dataclass(frozen=True)
class Piece:
    """A kernel, a copy, or an operator on the CPU (without those that it called). launch: a number that all kernels of
    one launch share."""

    begin: float
    seconds: float
    name: str
    part: str
    launch: int = -1

    @property
    def end(self) -> float:
        """In microseconds, as `begin`."""
        return self.begin + self.seconds * 1e6


@dataclass(frozen=True)
class Kernel:
    """All pieces of one name in one part. bytes: of the weights that they read; None where that is not known."""

    name: str
    part: str
    seconds: float
    calls: int
    bytes: int | None


@dataclass(frozen=True)
class Breakdown:
    """seconds: of each part, in the order of PARTS; those without any are left out. wall: of the run. rounds: full
    passes. kernels: slowest first. gpu: whether kernels of a GPU are what was counted. timeline: the part of every
    moment. doubts: what the trace does not tell, in words."""

    seconds: dict[str, float]
    wall: float
    rounds: int
    kernels: list[Kernel]
    gpu: bool
    timeline: list[Interval] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def read(file: Path, origin: int) -> list[dict[str, Any]]:
    """The complete events of a trace, their `ts` in microseconds since `origin` (nanoseconds since 1970)."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        document = json.load(opened)
    shift = (int(document.get("baseTimeNanoseconds", 0)) - origin) / 1000
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    for event in events:
        event["ts"] += shift
    return events


def window(events: Iterable[Mapping[str, Any]], seconds: float) -> tuple[float, float]:
    """When a run began, in microseconds, and how many seconds it took, in a recording that began at 0.

    A recording is longer than its run: counters are read before it and after it, and the reading after it waits
    for the rounds that a scheduler had begun ahead. The run ended with its last engine step. It took `seconds` by a
    clock that is not the trace's, and began before its first step, for a request is made ready first. Where that clock
    disagrees, the run still holds all of its steps and nothing from before the recording, whatever it says.

    Raises:
        ValueError: the trace has no range of an engine step.
    """
    steps = [(begin, end) for begin, end, name in _ranges(events) if name == "step"]
    if not steps:
        raise ValueError("the trace has no range of an engine step")
    end = max(end for _, end in steps)
    begin = max(0.0, min(steps[0][0], end - seconds * 1e6))
    return begin, (end - begin) / 1e6


def breakdown(
    engine: Sequence[Mapping[str, Any]],
    frontend: Sequence[Mapping[str, Any]],
    wall: float,
    *,
    begin: float = 0.0,
    step: Sequence[tuple[str, str]] = (),
    steps: int | None = None,
    weights: Mapping[str, Sequence[int]] | None = None,
) -> Breakdown:
    """Attribute the time of a run that began at `begin` (microseconds) and took `wall` seconds.

    What runs after the last token is left out: a scheduler that runs ahead has begun a round that nobody waits for.

    engine, frontend: events of the process of the worker, and of another one in front of it (none if it is the same).
    step: kernels of one draft step with their parts (`draft_step`), for those that a graph launched. steps: draft steps
    that were made, as far as they were counted; see `_unseen_steps`. weights: bytes of the weights in the order of the
    products of a full pass (`full`) and of a draft step (`draft`).

    Raises:
        ValueError: the trace has no range of a full pass.
    """
    ranges, doubts = _ranges(engine), list[str]()
    end = begin + wall * 1e6
    rounds = sum(name == "verify" and at < end for at, _, name in ranges)
    if not rounds:
        raise ValueError("the trace has no range of a verify pass")
    host = _host(ranges)
    device = [event for event in engine if event.get("cat") in GPU_WORK]
    if device:
        pieces = _device_pieces(engine, device, host, step)
        unseen, doubts = _unseen_steps(pieces, step, steps)
        waiting = [(at, until, part if part in ("scheduler", "detokenise") else HOST) for at, until, part in host]
        engines = [*waiting, *unseen, *_covered(pieces)]
    else:
        pieces, engines = _operator_pieces(engine, host), host
    in_front = [interval for interval in _host(_ranges(frontend)) if interval[2] == "detokenise"]
    timeline = painted([*in_front, *engines])
    outside = sum(until - at for at, until, _ in timeline)
    timeline = [(max(at, begin), min(until, end), part) for at, until, part in timeline if until > begin and at < end]
    outside = (outside - sum(until - at for at, until, _ in timeline)) / 1e6
    if outside > ROUNDS_AHEAD * wall / rounds + 0.05 * wall:
        doubts.append(f"{outside:.3g} s of work lie outside the run: the clocks of the processes disagree")
    timeline = painted([(begin, end, IDLE), *timeline])
    seconds = dict.fromkeys(PARTS, 0.0)
    for at, until, part in timeline:
        seconds[part] += (until - at) / 1e6
    spent = {part: time for part, time in seconds.items() if time > 0}
    kernels, unpaired = _kernels(pieces, weights or {}, (begin, end), step, _passes(pieces, step, steps))
    return Breakdown(spent, wall, rounds, kernels, bool(device), timeline, doubts + unpaired)


def _unseen_steps(
    pieces: Sequence[Piece], step: Sequence[tuple[str, str]], steps: int | None
) -> tuple[list[Interval], list[str]]:
    """Draft steps that were made and are not in the trace, as intervals between those that are, and what to say of it.

    Of a loop inside a CUDA graph the profiler may see one pass alone (the last one on an H200), and the GPU seems
    idle during the others. Each step that was counted and not seen gets as much of this idle time as a seen one took on
    average, divided among its parts in the same shares, as far as the idle time lasts.
    """
    drafted = [piece for piece in pieces if (piece.name, piece.part) in step]
    seen = _seen(pieces, step)
    if steps and not seen:
        return [], [
            f"which kernels a draft step has is not known: {steps} draft steps inside CUDA graphs may count as "
            "the host's"
        ]
    if steps is None or steps <= seen:
        return [], []
    spent: dict[str, float] = {}
    for begin, end, part in painted(_covered(drafted)):
        spent[part] = spent.get(part, 0.0) + end - begin
    total = sum(spent.values())
    needed = left = total / seen * (steps - seen)
    intervals: list[Interval] = []
    for gaps in _idle(pieces, step[-1]):
        room = sum(end - at for at, end in gaps)
        taken = min(left, room)
        left -= taken
        for at, end in gaps:
            whole = taken * (end - at) / room
            for part, time in spent.items():
                intervals.append((at, at + whole * time / total, part))
                at = intervals[-1][1]
    doubt = (
        f"{steps - seen} of {steps} draft steps are not in the trace: the profiler does not see all passes of a "
        "loop inside a CUDA graph. They are counted as the time of those that it saw"
    )
    if left > 0.05 * needed:
        doubt += f", as far as the GPU seems idle beside them, which is {1 - left / needed:.0%} of it"
    return sorted(intervals), [doubt]


def _seen(pieces: Sequence[Piece], step: Sequence[tuple[str, str]]) -> int:
    """Draft steps that the trace has whole."""
    return sum((piece.name, piece.part) == step[-1] for piece in pieces) if step else 0


def _passes(pieces: Sequence[Piece], step: Sequence[tuple[str, str]], steps: int | None) -> float:
    """Draft steps that were made for each one that the trace has; 1 where it has them all, or nobody counted."""
    seen = _seen(pieces, step)
    return max(steps / seen, 1.0) if seen and steps is not None else 1.0


def _idle(pieces: Sequence[Piece], last: tuple[str, str]) -> tuple[list[tuple[float, float]], ...]:
    """When the GPU seems idle inside launches that have the kernel `last`, which ends a pass, and when after them.

    Inside a launch nothing waits for the host, so idle time there is passes that the profiler did not see, before the
    one that it saw. After a launch come the passes that are missed by a profiler that sees the first one, and there the
    GPU may also wait for the host.
    """
    launches: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        launches.setdefault(piece.launch, []).append(place)
    inside, behind = list[tuple[float, float]](), list[tuple[float, float]]()
    for places in launches.values():
        launched = [pieces[place] for place in places]
        if any((piece.name, piece.part) == last for piece in launched):
            between = [(earlier.end, later.begin) for earlier, later in pairwise(launched)]
            inside += sorted(between, key=lambda gap: gap[1] - gap[0])[-1:]
            behind += [(launched[-1].end, later.begin) for later in pieces[places[-1] + 1 :][:1]]
    return tuple([(at, end) for at, end in gaps if end > at] for gaps in (inside, behind))


def draft_step(engine: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The kernels of one draft step with their parts, in order, from a trace in which they were launched one by one.

    A step ends with its gate. The steps that are most often alike are taken; none where nothing was drafted.
    """
    device = [event for event in engine if event.get("cat") in GPU_WORK]
    pieces = [piece for piece in _device_pieces(engine, device, _host(_ranges(engine)), ()) if piece.part in DRAFTING]
    steps: Counter[tuple[tuple[str, str], ...]] = Counter()
    step: list[tuple[str, str]] = []
    for piece in pieces:
        if step and step[-1][1] == "gate" and piece.part != "gate":
            steps[tuple(step)] += 1
            step = []
        step.append((piece.name, piece.part))
    complete = [(count, kernels) for kernels, count in steps.items() if any(part == "trunk" for _, part in kernels)]
    return list(max(complete)[1]) if complete else []


def _ranges(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """selfspec's ranges on the host, without their prefix, in order of their begin."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") in ("user_annotation", "cpu_op") and event.get("name", "").startswith(PREFIX)
    )


def painted(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals without overlaps, in order: each moment is that of the last of `intervals` that holds it."""
    import numpy

    if not intervals:
        return []
    bounds, places = numpy.unique([interval[:2] for interval in intervals], return_inverse=True)
    parts = [part for _, _, part in intervals]
    names = list(dict.fromkeys(parts))
    shown = numpy.full(len(bounds), -1)  # the part from each bound on; -1: none
    for (first, last), part in zip(places.reshape(-1, 2).tolist(), parts, strict=True):
        shown[first:last] = names.index(part)
    changes = numpy.flatnonzero(numpy.diff(shown, prepend=-1)).tolist()
    edges = bounds.tolist()
    return [(edges[at], edges[end], names[shown[at]]) for at, end in pairwise(changes) if shown[at] >= 0]


def _host(ranges: Sequence[Interval]) -> list[Interval]:
    """The part that the host is in: of ranges that nest, the innermost."""
    nested = sorted(ranges, key=lambda interval: (interval[0], -interval[1]))
    return painted([(at, until, PART_OF.get(name, OTHER)) for at, until, name in nested])


def _covered(pieces: Sequence[Piece]) -> list[Interval]:
    """The parts of pieces, for `painted`: where streams overlap, that of the piece that began first is seen."""
    return [(piece.begin, piece.end, piece.part) for piece in reversed(pieces)]


def _device_pieces(
    events: Sequence[Mapping[str, Any]],
    device: Sequence[Mapping[str, Any]],
    host: Sequence[Interval],
    step: Sequence[tuple[str, str]],
) -> list[Piece]:
    """Work of a GPU with the part that launched it, in order.

    A kernel belongs to the innermost range that its launch lies in, and all kernels of a graph share its launch. Of a
    loop inside a graph no launch may be known. What a graph or nobody launched is looked up in `step` where a range of
    drafting launched it, or nobody.
    """
    begins = [begin for begin, _, _ in host]
    launched = {
        event["args"]["correlation"]: (_part_at(event["ts"], host, begins), "GraphLaunch" in event["name"])
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    pieces, place, launch = [], -1, -1
    for event in sorted(device, key=lambda work: work["ts"]):
        correlation = event.get("args", {}).get("correlation", -1)
        nobody = IDLE if step else UNSEEN_LAUNCHES.get(event["name"], IDLE)
        part, by_graph = launched.get(correlation, (nobody, True))
        if correlation in launched:  # else it is a loop's: it is inside the graph that the kernel before it is of
            launch = correlation
        look_up = step and by_graph and part in (IDLE, "draft")
        part = OTHER if part == IDLE else part
        if look_up:
            part, place = _in_step(event["name"], step, place, part)
        pieces.append(Piece(event["ts"], event["dur"] / 1e6, event["name"], part, launch))
    return pieces


def _in_step(name: str, step: Sequence[tuple[str, str]], place: int, unknown: str) -> tuple[str, int]:
    """The part of a kernel that runs after the one at `place` of a draft step, and its own place: the next of its name,
    going round. A name that is in no step is `unknown`, and the place stays."""
    for ahead in range(1, len(step) + 1):
        at = (place + ahead) % len(step)
        if step[at][0] == name:
            return step[at][1], at
    return unknown, place


def _operator_pieces(events: Sequence[Mapping[str, Any]], host: Sequence[Interval]) -> list[Piece]:
    """Operators of the CPU, each for the time that no other inside it took, with the part that the host was in."""
    threads = Counter(event["tid"] for event in events if event.get("name", "").startswith(PREFIX))
    if not threads:
        return []
    main = threads.most_common(1)[0][0]
    operators = [
        event
        for event in events
        if event.get("tid") == main and event.get("cat") == "cpu_op" and not event["name"].startswith(PREFIX)
    ]
    begins = [begin for begin, _, _ in host]
    inside = [0.0] * len(operators)
    order = sorted(range(len(operators)), key=lambda i: (operators[i]["ts"], -operators[i]["dur"]))
    stack: list[int] = []
    for i in order:
        begin = operators[i]["ts"]
        while stack and operators[stack[-1]]["ts"] + operators[stack[-1]]["dur"] <= begin:
            stack.pop()
        if stack:
            inside[stack[-1]] += operators[i]["dur"]
        stack.append(i)
    return [
        Piece(
            operators[i]["ts"],
            max(0.0, operators[i]["dur"] - inside[i]) / 1e6,
            operators[i]["name"],
            _part_at(operators[i]["ts"], host, begins),
        )
        for i in order
    ]


def _part_at(ts: float, host: Sequence[Interval], begins: Sequence[float]) -> str:
    at = bisect_right(begins, ts) - 1
    return host[at][2] if at >= 0 and ts <= host[at][1] else IDLE


def _kernels(
    pieces: Sequence[Piece],
    weights: Mapping[str, Sequence[int]],
    run: tuple[float, float],
    step: Sequence[tuple[str, str]],
    passes: float,
) -> tuple[list[Kernel], list[str]]:
    """Pieces that begin inside the run by name and part, slowest first, with bytes where every piece is the product
    with a known weight; and what is not known of them. Those of a draft step count `passes` times."""
    sizes: dict[int, int] = {}
    doubts = []
    for which, what, parts in PASSES:
        order = weights.get(which) or []
        places = [place for place, piece in enumerate(pieces) if piece.part in parts and is_product(piece.name)]
        if order and len(places) % len(order):
            doubts.append(
                f"{what}: {len(places)} products are no whole number of passes over {len(order)} weights, so "
                "which reads which is not known"
            )
        elif order:
            sizes |= {place: order[number % len(order)] for number, place in enumerate(places)}
    together: dict[tuple[str, str], list[int]] = {}
    for place, piece in enumerate(pieces):
        if run[0] <= piece.begin < run[1]:
            together.setdefault((piece.name, piece.part), []).append(place)
    kernels = []
    for (name, part), places in together.items():
        sizes_read = [sizes[place] for place in places if place in sizes]
        times = passes if (name, part) in step else 1.0
        bytes_read = round(times * sum(sizes_read)) if len(sizes_read) == len(places) else None
        seconds = times * sum(pieces[place].seconds for place in places)
        kernels.append(Kernel(name, part, seconds, round(times * len(places)), bytes_read))
    return sorted(kernels, key=lambda kernel: -kernel.seconds), doubts


def is_product(name: str) -> bool:
    """Whether a kernel or an operator of this name multiplies by a weight."""
    return bool(PRODUCT.search(name)) and not NO_PRODUCT.search(name)
