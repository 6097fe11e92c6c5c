"""A live engine under PyTorch's profiler: traces of the processes that work, on one clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.vllm_plugin.observe.annotate import annotate_frontend

if TYPE_CHECKING:
    from selfspec_cli.engine.live import Engine, Generation


@dataclass(frozen=True)
class Recording:
    """What was recorded. engine: the trace of the process that the first worker is in. frontend: that of this process,
    where it is another one. origin: just before the generation, nanoseconds since 1970, which is the clock of the
    traces; `report.trace.window` says when the run itself began and ended."""

    engine: Path
    frontend: Path | None
    origin: int
    generation: Generation


def in_this_process(engine: Engine) -> bool:
    """Whether the engine runs in this process, with its worker."""
    return hasattr(engine.llm.llm_engine, "model_executor")


def can_detokenize(engine: Engine) -> bool:
    """Whether the engine has a tokenizer."""
    return not engine.llm.model_config.skip_tokenizer_init


def annotate(engine: Engine) -> list[str]:
    """Named ranges around the parts of a round, in every process, from now on; their names."""
    return [*engine.call("early_exit_annotate"), *annotate_frontend(engine.llm.llm_engine)]


def record(
    engine: Engine,
    prompts: Sequence[list[int]],
    output_len: int,
    folder: Path,
    *,
    eager_drafts: bool = False,
    nsight: bool = False,
) -> Recording:
    """Generate as the engine's workload says, under a profiler; the traces go to `folder`.

    eager_drafts, nsight: see `EarlyExitWorker.early_exit_profile_start`; Nsight Systems writes its own file.
    """
    traces = folder / "engine.json.gz", None if in_this_process(engine) or nsight else folder / "frontend.json.gz"
    work = engine.cfg.workload
    engine.llm.collective_rpc("early_exit_profile_start", args=(nsight, eager_drafts))
    own = _frontend_profiler() if traces[1] is not None else None
    try:
        origin = time.time_ns()
        made = engine.generate(
            prompts,
            output_len,
            batch=work.batch,
            temperature=work.temperature,
            seed=engine.cfg.seed,
            detokenize=can_detokenize(engine),
        )
    finally:
        if own is not None:
            own.stop()
        engine.llm.collective_rpc("early_exit_profile_stop", args=(str(traces[0]),))
    if own is not None:
        own.export_chrome_trace(str(traces[1]))
    return Recording(traces[0], traces[1], origin, made)


def _frontend_profiler() -> Any:
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    return profiler
