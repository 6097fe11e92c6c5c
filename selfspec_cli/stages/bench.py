"""Measure one arm on a live engine: speed, drafting, perplexity, and whether the output is the baseline's.

Baseline and candidate go through this same function. Every repeat generates the same tokens from the same prompts, so
the repeats differ in time only; the outputs that are compared are those of the last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.cost_model import Costs, efficiency
from selfspec_cli.engine.live import Engine, Generation
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import provenance, records
from selfspec_cli.record.records import AcceptRow, Baseline, BenchResult, Record
from selfspec_cli.stages import quality
from selfspec_cli.texts import prompts as workload


def run(cfg: RunConfig, engine: Engine, baseline: Baseline | None = None, progress: Progress = ignore) -> BenchResult:
    """Warm up, time `cfg.repeats` repeats, score held-out text.

    Args:
        baseline: the baseline's row and outputs of the same model, workload and run; None measures the baseline.
    """
    reset_peak_memory()
    prompts = workload.prompts(cfg, engine)
    work = cfg.workload
    repeats: list[Generation] = []
    for number in range(cfg.warmup + cfg.repeats):
        if number == cfg.warmup:
            engine.call("early_exit_meter_start")
        generation = engine.generate(
            prompts, work.output_len, batch=work.batch, temperature=work.temperature, seed=cfg.seed
        )
        if number >= cfg.warmup:
            repeats.append(generation)
        progress("repeats", number + 1, cfg.warmup + cfg.repeats)
    meter = engine.call("early_exit_meter_stop")
    record = records.identity(cfg, run_id="", layer=engine.layer, device=provenance.device())
    record = _with_speed(record, repeats, baseline)
    accept = _accept_row(record, repeats)
    record = replace(_with_drafting(record, accept), **meter)
    record = _with_prediction(record, engine.call("early_exit_step_bytes"))
    outputs = repeats[-1].outputs
    if baseline is not None and cfg.acceptance_length is None:  # set acceptance makes its own text
        record.outputs = len(outputs)
        record.identical = sum(ours == theirs for ours, theirs in zip(outputs, baseline.outputs, strict=True))
    if cfg.perplexity_tokens:
        record.ppl = quality.perplexity(engine, cfg.perplexity_tokens, cfg.seed)
        if baseline is not None and baseline.record.ppl is not None:
            record.delta_ppl = record.ppl - baseline.record.ppl
    record.peak_mem_mib = record.peak_mem_mib or peak_memory_mib()
    record.weights_mib, record.kv_blocks = engine.weights_mib, engine.kv_blocks
    return BenchResult(record, outputs, accept, _drafting(repeats, accept))


def _drafting(repeats: Sequence[Generation], accept: AcceptRow | None) -> dict[str, Any] | None:
    """What the draft loop counted over the timed repeats; None where it keeps no counters."""
    counted = counters.total(repeat.drafting for repeat in repeats)
    if counted is None or accept is None:
        return None
    return counters.summary(counted, accept.rounds or 0, accept.drafted or 0, accept.accepted or 0)


def _with_speed(record: Record, repeats: Sequence[Generation], baseline: Baseline | None) -> Record:
    speeds = [repeat.tokens_per_second for repeat in repeats]
    median = statistics.median(speeds)
    against = baseline.record.tok_s_median if baseline is not None else median
    itl = [value for repeat in repeats for value in repeat.itl]
    return replace(
        record,
        tok_s_median=median,
        tok_s_min=min(speeds),
        tok_s_max=max(speeds),
        speedup=None if against is None else median / against,
        ttft_ms=1000 * statistics.median(value for repeat in repeats for value in repeat.ttft),
        itl_ms=1000 * statistics.median(itl) if itl else None,
    )


def _accept_row(record: Record, repeats: Sequence[Generation]) -> AcceptRow | None:
    """vLLM's counters summed over the repeats; None for an arm that drafts nothing."""
    counts = [repeat.drafts for repeat in repeats if repeat.drafts is not None]
    if not counts:
        return None
    at = [sum(position) for position in zip(*(count.accepted_at for count in counts), strict=True)]
    return replace(
        records.accept_identity(record),
        rounds=sum(count.rounds for count in counts),
        drafted=sum(count.drafted for count in counts),
        accepted=sum(count.accepted for count in counts),
        accepted_at=" ".join(map(str, at)),
    )


def _with_drafting(record: Record, accept: AcceptRow | None) -> Record:
    if accept is None or not accept.rounds or not accept.drafted or accept.accepted is None:
        return record
    return replace(
        record,
        accept_rate=accept.accepted / accept.drafted,
        mean_accepted_len=1 + accept.accepted / accept.rounds,
        drafted_per_round=accept.drafted / accept.rounds,
    )


def _with_prediction(record: Record, read: dict[str, float] | None) -> Record:
    """The cost model's speedup for the accepted length that was measured, a step's time taken as the bytes it reads.

    read: what `EarlyExitWorker.early_exit_step_bytes` answers; None where bytes do not tell the time.
    """
    if read is None or record.mean_accepted_len is None or record.drafted_per_round is None or record.speedup is None:
        return record
    assert record.input_len is not None and record.output_len is not None and record.batch is not None
    tokens = record.batch * (record.input_len + record.output_len / 2)  # of context, on average over the generation
    predicted = Costs.from_bytes(read, tokens).speedup(record.mean_accepted_len, record.drafted_per_round)
    return replace(record, predicted=predicted, efficiency=efficiency(record.speedup, predicted))


def reset_peak_memory() -> None:
    """Let the peak begin anew. Linux; elsewhere, and in containers that forbid it, it stays the whole process's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib() -> float | None:
    """Peak resident memory (MiB) of this process since the last reset; None where /proc does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) / 1024 if peaks else None
