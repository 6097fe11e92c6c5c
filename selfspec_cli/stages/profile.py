"""Where the time of one arm goes: a run of its workload under PyTorch's profiler.

Every moment of the run belongs to one part. On a GPU it is the part that launched the kernels that run; while none
runs, the moment belongs to the scheduler or to detokenisation if the host is at that, to `host` if the host is at any
other part, and is `idle` otherwise. On the CPU it is the innermost range that the host is in.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import tables
from selfspec_cli.record.quality import PARTS, Profile
from selfspec_cli.texts.prompts import workload_prompts

STEPS = 3  # that progress counts
PREFIX = "selfspec."  # of the ranges (vllm_plugin/observe/profiler.py)
PART_OF = {"logits": "verify", "sample": "sampler", "schedule": "scheduler"}
"""The parts of ranges that are called otherwise."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

Interval = tuple[float, float, str]  # begin and end in microseconds, and a part


def run(
    cfg: RunConfig,
    *,
    open_engine: OpenEngine,
    tokens: int,
    progress: Progress = ignore,
) -> tuple[Profile, Path]:
    """Warm up, generate once without the profiler and once with it; the profile, and its file, with the trace beside
    it. The first `batch` prompts of the workload run at once, with at most `tokens` output tokens each. Raises
    ConfigError: the results folder is in use, or cannot be written; RecordError: the profile could not be written."""
    folder, work = Path(cfg.results_dir), cfg.workload
    with interrupts.deferred(), results.writing(folder):
        with open_engine(cfg) as engine, TemporaryDirectory(prefix="selfspec-") as scratch:
            prompts = list(workload_prompts(cfg, engine)[: work.batch])

            def generate() -> Any:
                return engine.generate(
                    prompts,
                    min(work.output_len, tokens),
                    batch=work.batch,
                    temperature=work.temperature,
                    seed=cfg.seed,
                    detokenize=not engine.llm.model_config.skip_tokenizer_init,
                )

            for done in range(1, STEPS):  # the first warms up
                plain = generate()
                progress("profile", done, STEPS)
                interrupts.check()
            file = Path(scratch) / "trace.json.gz"
            engine.call("early_exit_profile_start")
            try:
                profiled = generate()
            finally:
                kernels = engine.call("early_exit_profile_stop", str(file))
            identity = tables.identity(cfg, engine.layer)
            trace = file.read_bytes()
        found = breakdown(json.loads(gzip.decompress(trace))["traceEvents"])
        keys, name = Keys(), results.new_run_id()
        profile = Profile(
            key=keys.run(cfg),
            run_id=name,
            time=results.now(),
            device=keys.device(cfg),
            arm=identity,
            tokens=sum(map(len, profiled.outputs)),
            tok_s=plain.tokens_per_second,
            tok_s_profiled=profiled.tokens_per_second,
            kernels=kernels,
            trace=f"{keys.run(cfg)}-{name}.trace.json.gz",
            config=to_plain(cfg),
            **found,
            **machine.provenance(),
        )
        path = results.save_profile(folder, profile, trace)
        progress("profile", STEPS, STEPS)
    return profile, path


def breakdown(trace: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Attribute the time of a recorded run, from the begin of its first range to the end of its last one: seconds of
    each part, wall time, rounds, and whether kernels of a GPU were counted. Raises ValueError without a full pass."""
    events = [event for event in trace if event.get("ph") == "X"]
    ranges = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") in ("user_annotation", "cpu_op") and event["name"].startswith(PREFIX)
    ]
    rounds = sum(name == "verify" for _, _, name in ranges)
    if not rounds:
        raise ValueError("the trace has no range of a verify pass")
    begin, end = min(at for at, _, _ in ranges), max(until for _, until, _ in ranges)
    nested = sorted(ranges, key=lambda interval: (interval[0], -interval[1]))  # the innermost of a moment comes last
    host = painted([(at, until, PART_OF.get(name, name)) for at, until, name in nested])
    device = _launched(events, host)
    if device:
        host = [(at, until, part if part in ("scheduler", "detokenise") else "host") for at, until, part in host]
    seconds = dict.fromkeys(PARTS, 0.0)
    for at, until, part in painted([(begin, end, "idle"), *host, *device]):
        seconds[part] += max(0.0, min(until, end) - max(at, begin)) / 1e6
    spent = {part: time for part, time in seconds.items() if time > 0}
    return {"seconds": spent, "wall": (end - begin) / 1e6, "rounds": rounds, "gpu": bool(device)}


def painted(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals without overlaps, in order: each moment is that of the last of `intervals` that holds it."""
    import numpy

    bounds, places = numpy.unique([interval[:2] for interval in intervals], return_inverse=True)
    parts = [part for _, _, part in intervals]
    names = list(dict.fromkeys(parts))
    shown = numpy.full(len(bounds), -1)  # the part from each bound on; -1: none
    for (first, last), part in zip(places.reshape(-1, 2).tolist(), parts, strict=True):
        shown[first:last] = names.index(part)
    changes = numpy.flatnonzero(numpy.diff(shown, prepend=-1)).tolist()
    edges = bounds.tolist()
    return [(edges[at], edges[end], names[shown[at]]) for at, end in pairwise(changes) if shown[at] >= 0]


def _launched(events: Sequence[Mapping[str, Any]], host: Sequence[Interval]) -> list[Interval]:
    """Work of a GPU, an interval a launch with the part that the host was in; where streams overlap, `painted` shows
    the launch that began first. The kernels of a CUDA graph share their launch. Inside a graph nothing waits for the
    host: what seems idle there is passes of a loop of which the profiler sees the last alone (H200). A kernel whose
    launch is not known runs in such a loop, and belongs to the graph before it."""
    begins = [begin for begin, _, _ in host]
    launches = {}
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            place = bisect_right(begins, event["ts"]) - 1
            inside = place >= 0 and event["ts"] <= host[place][1]
            part = host[place][2] if inside else "other"
            launches[event["args"]["correlation"]] = part, "GraphLaunch" in event["name"]
    spans: dict[int, Interval] = {}
    graph = -1
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda work: work["ts"]):
        launch = event.get("args", {}).get("correlation", -1)
        launch = launch if launch in launches else graph
        part, by_graph = launches.get(launch, ("other", False))
        graph = launch if by_graph else graph
        begin, until = event["ts"], event["ts"] + event["dur"]
        if launch in spans:
            begin, until = spans[launch][0], max(until, spans[launch][1])
        spans[launch] = begin, until, part
    return sorted(spans.values(), reverse=True)
