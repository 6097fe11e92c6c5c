"""What the steps of an engine take on the device, measured on its captured graphs at the start.

Each decode graph of the target is replayed a few times, and so is the draft loop's graph with no request in it, which
makes it run one step: it reads all weights, and attends to nothing. That takes about a second, and only where nothing
was measured before for the same model, settings, GPU and versions. The file is also how the times reach a scheduler
that runs in another process than its workers."""

from __future__ import annotations

import hashlib
import json
import math
import time
from bisect import insort
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfspec_cli.early_exit.rule import REQUESTS, StepTimes
from selfspec_cli.vllm_plugin import releases
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2 import device_loop
from selfspec_cli.vllm_plugin.vllm_names import current_platform, init_logger
from selfspec_cli.whole import cache_dir, written

logger = init_logger("vllm.selfspec")  # below vLLM's own logger, which users configure

REPLAYS, MOST_REPLAYS = 5, 25
AGREEING = 1.02
"""A graph is replayed until the two shortest replays differ by no more than this factor. On a GPU of its own they
differ by less; what other processes do there meanwhile, such as engines that start too, makes replays longer."""


class Replay(NamedTuple):
    """A captured graph. launch: replays it. prepare: gives it its inputs, which other graphs share and change."""

    launch: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def known(config: Any) -> StepTimes | None:
    """The times that a worker of the engine with this VllmConfig has written, or found there."""
    file = _file(config)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    verify = {int(width): {int(n): value for n, value in times.items()} for width, times in found["verify"].items()}
    draft = {int(n): value for n, value in found["draft"].items()}
    attended = found["attended"] or math.inf
    return StepTimes(verify, draft, found["kv_token"], attended, drafting=found["drafting"])


def measure(
    config: Any,
    decodes: dict[int, dict[int, Replay]],
    drafts: dict[int, Replay] | None,
    kv_token: float,
    attended: float,
    drafting: float,
) -> StepTimes | None:
    """Time the graphs of an engine, or read what was measured before.
    decodes: by width and number of requests, a verify pass; drafts: by number of requests, one draft step; None where
    no layer drafts. kv_token: bytes of keys and values of a token of context. attended, drafting: see
    `StepTimes`.
    Returns: the times; None where there are no graphs."""
    if not decodes.get(0) or drafts == {}:
        return None
    before = known(config)
    if before is not None:
        return before
    began = time.perf_counter()
    verify = {
        width: _timed(replays, f"a verify pass of {{}} requests with {width} drafts each")
        for width, replays in decodes.items()
        if replays
    }
    draft = _timed(drafts, "a draft step of {} requests") if drafts else {1: 0.0}
    times = StepTimes(verify, draft, kv_token / _bytes_per_second(), attended, drafting=drafting)
    found = {"verify": verify, "draft": draft, "kv_token": times.kv_token, "drafting": drafting}
    with written(_file(config)) as part:  # JSON has no infinity
        part.write_text(json.dumps(found | {"attended": attended if attended < math.inf else None}), encoding="utf-8")
    logger.info(
        "draft lengths: measured %d kinds of steps in %.2f s; at one request a plain step takes %.2f ms of the device, "
        "a draft step %.2f ms",
        sum(map(len, verify.values())) + len(draft),
        time.perf_counter() - began,
        1000 * verify[0][min(verify[0])],
        1000 * draft[min(draft)],
    )
    return times


def _timed(replays: dict[int, Replay], what: str) -> dict[int, float]:
    """Seconds of a replay by number of requests, which stands in `what` for {}."""
    numbers = [n for n in replays if n in REQUESTS or n == max(replays)]
    return {n: _seconds(what.format(n), replays[n]) for n in numbers}


def _seconds(what: str, replay: Replay) -> float:
    """Least time of a replay, for others that use the GPU only make it longer. Raises as `device_loop.wait`."""
    replay.prepare()
    replay.launch()
    device_loop.wait(what)
    taken: list[float] = []  # the shortest first
    while len(taken) < REPLAYS or (taken[1] > AGREEING * taken[0] and len(taken) < MOST_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay.launch()
        end.record()
        end.synchronize()
        insort(taken, begin.elapsed_time(end) / 1000)
    return taken[0]


def _bytes_per_second() -> float:
    """How fast this GPU reads memory, by a copy, which reads half of what it moves."""
    source = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds("a copy of 128 MiB", Replay(lambda: target.copy_(source)))


def _file(config: Any) -> Path:
    """Where the times of an engine are kept: under what they depend on."""
    settings = settings_of(config)
    assert settings is not None
    known = {
        "form": 2,  # of the file
        "model": config.model_config.hf_config.to_dict(),
        "dtype": str(config.model_config.dtype),
        "longest": config.model_config.max_model_len,
        "cache": str(config.cache_config.cache_dtype),
        "settings": settings.to_dict(),
        "requests": config.scheduler_config.max_num_seqs,
        "ranks": config.parallel_config.tensor_parallel_size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "attention": str(config.attention_config.backend),
        "device": current_platform.get_device_name(),
        "versions": [releases.installed(), releases.own_version(), torch.__version__],
    }
    name = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return cache_dir() / "step_times" / f"{name}.json"
