"""Where the time of one arm goes: a run of its workload under PyTorch's profiler, taken apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.engine import profiling
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import tables
from selfspec_cli.record.profiles import Profile
from selfspec_cli.report import trace
from selfspec_cli.texts.prompts import workload_prompts

if TYPE_CHECKING:
    from selfspec_cli.engine.live import Engine, Generation

OpenEngine = Callable[[RunConfig], AbstractContextManager[Any]]
TOKENS = 64
"""Tokens of each request that are profiled: a trace of more is too big for a browser, and says nothing else."""
STEPS = 4  # that progress counts
KERNELS = 40
"""Kernels that a profile keeps."""
EAGER_TOKENS = 24
"""Enough rounds to see which kernels a draft step is made of."""
PARALLEL = "the scheduler is in a process of its own: its time is idle here"
NO_RATE = "the memory's rate of this machine is not known, so kernels have bytes a second and no share of it"
NO_WEIGHTS = "which weights a step of this model reads is not known (experts, or another decoder), so no bytes are"
NO_TEXT = "the model has no tokenizer, so no text was made"


def run(
    cfg: RunConfig,
    *,
    open_engine: OpenEngine,
    tokens: int = TOKENS,
    progress: Progress = ignore,
    run_id: str | None = None,
) -> tuple[Profile, Path]:
    """Warm up, generate once without the profiler and once with it; the profile, and its file. The trace is beside it.

    The workload is that of `cfg`: its first `batch` prompts at once, and at most `tokens` output tokens of each.

    Raises:
        ConfigError: the results folder is in use, or cannot be written.
        RecordError: the profile could not be written.
    """
    folder = Path(cfg.results_dir)
    with interrupts.deferred(), results.sweep_lock(folder):
        results.prepare(folder)
        with open_engine(cfg) as engine, TemporaryDirectory(prefix="selfspec-") as scratch:
            seen = _observe(cfg, engine, tokens, Path(scratch), progress)
            identity = tables.identity(cfg, engine.layer)
        made, parts, rate = seen.profiled, seen.parts, seen.about["memory_rate"]
        keys, name = Keys(), run_id or results.new_run_id()
        profile = Profile(
            key=keys.run(cfg),
            run_id=name,
            time=results.now(),
            device=keys.device(cfg),
            arm=identity,
            seconds=parts.seconds,
            wall=made.seconds,
            rounds=parts.rounds,
            tokens=sum(map(len, made.outputs)),
            tok_s=seen.plain.tokens_per_second,
            tok_s_profiled=made.tokens_per_second,
            kernels=[_kernel(one, rate) for one in parts.kernels[:KERNELS]],
            memory_rate=rate,
            gpu=parts.gpu,
            unknown=_unknown(cfg, seen),
            trace=f"{keys.run(cfg)}-{name}.trace.json.gz",
            config=to_plain(cfg),
            **machine.provenance(),
        )
        path = results.save_profile(folder, profile, _perfetto(seen.events, parts))
        progress("profile", STEPS, STEPS)
    return profile, path


@dataclass(frozen=True)
class _Observed:
    """What a live engine showed: a generation without the profiler and one with it, the events of all traces, and what
    the worker says of itself (`EarlyExitWorker.early_exit_about`)."""

    plain: Generation
    profiled: Generation
    events: list[dict[str, Any]]
    parts: trace.Breakdown
    about: dict[str, Any]
    text: bool  # whether text was made of the tokens


def _observe(cfg: RunConfig, engine: Engine, tokens: int, scratch: Path, progress: Progress) -> _Observed:
    prompts, length = _work(cfg, engine, tokens)
    about, text = engine.call("early_exit_about"), profiling.can_detokenize(engine)
    for done in range(2):  # the first warms up
        plain = engine.generate(
            prompts,
            length,
            batch=cfg.workload.batch,
            temperature=cfg.workload.temperature,
            seed=cfg.seed,
            detokenize=text,
        )
        progress("profile", done + 1, STEPS)
        interrupts.check()
    profiling.annotate(engine)
    step = _draft_step(engine, prompts, scratch) if about["captured"] else []
    progress("profile", 3, STEPS)
    interrupts.check()
    before = _draft_steps(engine)
    found = profiling.record(engine, prompts, length, scratch)
    made = None if before is None else (_draft_steps(engine) or 0) - before
    events = trace.read(found.engine, found.origin)
    in_front = [] if found.frontend is None else trace.read(found.frontend, found.origin)
    begin, wall = trace.window([*events, *in_front], found.generation.seconds)
    parts = trace.breakdown(events, in_front, wall, begin=begin, step=step, steps=made, weights=about["weights"])
    return _Observed(plain, found.generation, [*events, *in_front], parts, about, text)


def _work(cfg: RunConfig, engine: Engine, tokens: int) -> tuple[list[list[int]], int]:
    """The prompts to generate for, all at once, and how many tokens of each."""
    work = cfg.workload
    return list(workload_prompts(cfg, engine)[: work.batch]), min(work.output_len, tokens)


def under_nsight(cfg: RunConfig, *, open_engine: OpenEngine, tokens: int = TOKENS) -> None:
    """The same run inside what Nsight Systems records; to be called in a process that runs under it."""
    with interrupts.deferred(), open_engine(cfg) as engine, TemporaryDirectory(prefix="selfspec-") as scratch:
        prompts, length = _work(cfg, engine, tokens)
        work = cfg.workload
        engine.generate(prompts, length, batch=work.batch, temperature=work.temperature, seed=cfg.seed)
        profiling.annotate(engine)
        profiling.record(engine, prompts, length, Path(scratch), nsight=True)


def nsight_command(own: Sequence[str], out: Path) -> list[str]:
    """`own`, a command that calls `under_nsight`, under Nsight Systems; the recording goes to `out`.nsys-rep."""
    return [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--cuda-graph-trace=node",
        "--sample=none",
        "--trace-fork-before-exec=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={out}",
        *own,
    ]


def _draft_step(engine: Engine, prompts: Sequence[list[int]], scratch: Path) -> list[tuple[str, str]]:
    """The kernels of one draft step and their parts: a few rounds with a loop that is no graph."""
    folder = scratch / "eager"
    folder.mkdir()
    found = profiling.record(engine, prompts, EAGER_TOKENS, folder, eager_drafts=True)
    return trace.draft_step(trace.read(found.engine, found.origin))


def _draft_steps(engine: Engine) -> int | None:
    """Passes of the layers that draft so far; None for an engine without early exit."""
    counted = engine.call("early_exit_counters")
    return None if counted is None else int(counted["steps"])


def _kernel(one: trace.Kernel, rate: float | None) -> dict[str, Any]:
    share = None if one.bytes is None or not rate or not one.seconds else one.bytes / one.seconds / rate
    return {
        "name": one.name[:200],
        "part": one.part,
        "seconds": one.seconds,
        "calls": one.calls,
        "bytes": one.bytes,
        "rate": share,
    }


def _unknown(cfg: RunConfig, seen: _Observed) -> list[str]:
    unknown = [] if seen.text else [NO_TEXT]
    if cfg.model.tensor_parallel_size > 1:
        unknown.append(PARALLEL)
    if seen.about["memory_rate"] is None:
        unknown.append(NO_RATE)
    if seen.about["weights"] is None:
        unknown.append(NO_WEIGHTS)
    return unknown + seen.parts.doubts


def _perfetto(events: Sequence[dict[str, Any]], parts: trace.Breakdown) -> bytes:
    """A packed trace in Chrome's format, with a track of its own that says which part each moment was counted as."""
    track = [
        {"ph": "X", "cat": "part", "name": part, "pid": "selfspec: parts", "tid": 0, "ts": begin, "dur": end - begin}
        for begin, end, part in parts.timeline
    ]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": [*track, *events]}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0, compresslevel=5)
