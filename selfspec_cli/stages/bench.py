"""Measure one arm on a live engine, baseline or candidate: speed, drafting, latencies, perplexity.

Every repeat generates the same tokens from the same prompts; the outputs that are kept, as digests, are those of the
last one. Where several requests run at once, plain decoding answers once more in another batch order, untimed: how many
of its outputs stay the same is the control for how many of an arm's are the baseline's. (Random weights hold all tokens
equally likely, and their outputs tell nothing.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import cores, scoring
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.scoring import Passage
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import point, statistics
from selfspec_cli.record.columns import disturbed
from selfspec_cli.record.point import Measurement
from selfspec_cli.record.quality import perplexity as of_scores
from selfspec_cli.stages import humaneval, measure
from selfspec_cli.texts import library
from selfspec_cli.texts.prompts import Turn, workload_turns

WINDOW = 512  # tokens; long enough that most tokens have hundreds of tokens of context
OWN_DISTRIBUTION = (Method.baseline, Method.skip)
"""Methods whose predictions of a given text are their own. Prompt log-probabilities of an arm that drafts are the
target's, drafts or none, so that its figure would be the baseline's whatever it generates."""


def run(cfg: RunConfig, engine: Engine, progress: Progress = ignore, *, execute: bool = False) -> Measurement:
    """Warm up, time `cfg.repeats` repeats, score held-out text. execute: run the answers with their tests."""
    began = time.perf_counter()
    with suppress(OSError):  # let the peak of memory begin anew; some containers forbid it
        Path("/proc/self/clear_refs").write_text("5")
    start = [cores.now()]

    def timed() -> None:
        engine.call("early_exit_meter_start")
        start.append(cores.now())
        used = cores.shares(*start)
        if disturbed(used.get("cpu_own"), used.get("cpu_others")):
            progress.busy(used["cpu_others"])

    requests, kinds = workload_turns(cfg, engine)
    (arm,) = measure.run(engine, cfg, requests, repeats=cfg.repeats, warmup=cfg.warmup, timed=timed, progress=progress)
    used, repeats = cores.shares(start[-1], cores.now()), [part for (part,) in arm.repeats]
    names = ("layer", "weights_mib", "draft_mib", "kv_blocks", "max_model_len")
    facts: dict[str, Any] = {name: getattr(engine, name) for name in names}
    facts |= engine.call("early_exit_meter_stop") | used
    facts["step_bytes"] = engine.call("early_exit_step_bytes")
    if kinds:
        facts["categories"] = statistics.by_category(
            [list(zip(kinds, part.requests, part.steps, strict=True)) for part in repeats]
        )
    if execute:
        facts["pass_at_1"] = humaneval.scored(cfg, [engine.answer(output) for output in arm.outputs()])
    outputs = point.output_digests(arm.outputs())
    tells = cfg.workload.batch > 1 and not cfg.workload.temperature and cfg.model.load_format != "dummy"
    if cfg.method is Method.baseline and tells:
        facts[point.AS_ITSELF] = as_itself(engine, cfg, requests, outputs)
    interrupts.check()
    scored = perplexity(engine, cfg)
    facts.setdefault("peak_mem_mib", peak_memory_mib())
    return Measurement(
        repeats=tuple(
            point.Repeat(part.seconds, tuple(part.requests), part.verified, part.drafting) for part in repeats
        ),
        outputs=outputs,
        engine=facts,
        perplexity=scored,
        seconds=time.perf_counter() - began,
    )


def perplexity(engine: Engine, cfg: RunConfig) -> float | None:
    """exp of the mean negative log-likelihood over about `cfg.perplexity_tokens` held-out tokens; None where an arm has
    none of its own, or it is not wanted. Windows are drawn as for prompts; every token but a window's first is
    predicted from all of its window before it."""
    tokens = cfg.perplexity_tokens
    if not tokens or cfg.method not in OWN_DISTRIBUTION:
        return None
    # One token less than the model takes, because scoring a window asks the engine for one more.
    length = min(WINDOW, engine.max_model_len - 1, tokens + 1)
    count = max(1, tokens // (length - 1))
    windows = library.token_windows(engine.encode, library.held_out_text(), length, count, cfg.seed)
    scores = scoring.score(engine, [Passage(window) for window in windows])
    return of_scores([-one.log_likelihood for one in scores], [one.tokens for one in scores])


def as_itself(engine: Engine, cfg: RunConfig, requests: Sequence[Turn], outputs: Sequence[str]) -> int:
    """Ask everything once more, the last question first; return how many outputs are as before. outputs: as digests."""
    first = [place for place, request in enumerate(requests) if not callable(request)]
    questions = [range(begin, end) for begin, end in pairwise([*first, len(requests)])]
    order = [place for question in reversed(questions) for place in question]
    work = cfg.workload
    again = engine.generate([requests[place] for place in order], work.output_len, batch=work.batch, seed=cfg.seed)
    digests = point.output_digests(again.outputs)
    return sum(outputs[place] == digest for place, digest in zip(order, digests, strict=True))


def peak_memory_mib() -> float | None:
    """Peak resident memory (MiB) of this process since the last reset, or of all its time where it cannot be reset;
    None where /proc does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) / 1024 if peaks else None
