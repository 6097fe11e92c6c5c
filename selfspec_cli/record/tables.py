"""Points as rows: `Record` is the header of summary.csv and `AcceptRow` that of accept.tsv. Everything here is pure.

A value that was not measured is an empty cell (`None`), never 0.
"""

from __future__ import annotations

import csv
import inspect
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import draft_options, run_key
from selfspec_cli.config.schema import EARLY_EXIT, SPECULATIVE, RunConfig, gate_threshold, head_spec
from selfspec_cli.config.speculative import in_words
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.cost_model import Costs, efficiency
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.record import latency, load_columns
from selfspec_cli.record.point import FAILED, OK, Point, median


@dataclass
class Record:
    """One arm, measured. Times are wall time; tok/s counts generated tokens only."""

    run_id: str  # the command that measured it
    time: str  # ISO 8601, with the offset from UTC
    arm: str  # baseline, layer_skip, skip, draft_model; vllm: by its own methods, see `speculative`
    model: str
    E: int | None = None  # exit layer
    k: int | None = None  # draft tokens a round, at most
    head: str | None = None
    vocab: str | None = None  # draft vocabulary
    draft_weights: str | None = None  # shared: the target's own; fp8: 8-bit copies
    verification: str | None = None  # full: all k places of a request; adaptive: as many as pay
    gate: str | None = None
    threshold: float | None = None  # of the gate: probability (maxp) or nats squared (varH)
    runner: str | None = None  # vLLM's model runner, where one was asked for
    acceptance_length: float | None = None  # synthetic; empty: real acceptance
    workload: str | None = None
    batch: int | None = None  # requests in flight
    input_len: int | None = None  # tokens
    output_len: int | None = None  # tokens
    temperature: float | None = None
    seed: int | None = None
    repeats: int | None = None
    tok_s_median: float | None = None  # generated tokens a second, all requests together
    tok_s_min: float | None = None
    tok_s_max: float | None = None
    speedup: float | None = None  # tok_s_median over that of the baseline that `baseline` names
    predicted: float | None = None  # speedup by the cost model, from bytes read and the accepted length measured
    efficiency: float | None = None  # speedup / predicted
    accept_rate: float | None = None  # accepted / drafted tokens
    mean_accepted_len: float | None = None  # tokens a verify step yields: 1 + accepted/rounds
    drafted_per_round: float | None = None  # draft tokens that a verify pass had before it, of one request
    ttft_ms: float | None = None  # time to first token, median (`record.latency` defines all of these)
    itl_ms: float | None = None  # time between successive outputs of a request, median
    ppl: float | None = None  # text, under the arm's own predictions: baseline and skip (`ppl_protocol` says how)
    delta_ppl: float | None = None  # ppl minus the baseline's of the same text
    identical: int | None = None  # outputs equal to the baseline's, token for token; empty for sampled requests
    outputs: int | None = None  # outputs compared
    peak_mem_mib: float | None = None  # while measuring: tensors on a GPU, else this process's resident memory
    weights_mib: float | None = None
    kv_blocks: int | None = None  # of the KV cache
    sm_util: float | None = None  # share of the time that SMs were busy, 0 to 1 (NVML, mean over the repeats)
    dram_util: float | None = None  # share of the memory bandwidth (NVML)
    power_w: float | None = None  # mean board power (NVML)
    device: str | None = None  # in use: one GPU of eight is one GPU
    status: str = OK  # "ok", or "failed: reason"
    key: str = ""  # config.keys.run_key
    tpot_ms: float | None = None  # time for each output token after the first, median over requests
    e2e_ms: float | None = None  # time to the last token, median
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p90_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_p90_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_p90_ms: float | None = None
    e2e_p99_ms: float | None = None
    speedup_low: float | None = None  # 95 % interval of the speedup, by bootstrap over the repeats of both sides
    speedup_high: float | None = None
    verified_accept_rate: float | None = None  # accepted tokens / places that a verify pass looked at
    baseline: str | None = None  # id of the point that the speedup is over
    baseline_reused: bool | None = None  # whether an earlier command had measured it
    model_fingerprint: str | None = None
    verdict: str | None = None  # of `selfspec verify`
    verdict_cases: int | None = None  # that it looked at
    ppl_low: float | None = None  # 95 % intervals, by bootstrap over documents
    ppl_high: float | None = None
    delta_ppl_low: float | None = None
    delta_ppl_high: float | None = None
    ppl_protocol: str | None = None  # corpus, window, stride; empty: drawn windows of `perplexity_tokens`, by bench
    ppl_of_greedy: float | None = None  # what the arm generates, under the plain model (`selfspec ppl`)
    ppl_of_greedy_low: float | None = None  # 95 % intervals, by bootstrap over prompts
    ppl_of_greedy_high: float | None = None
    delta_ppl_of_greedy: float | None = None  # minus that of the baseline's continuations of the same prompts
    delta_ppl_of_greedy_low: float | None = None
    delta_ppl_of_greedy_high: float | None = None
    ppl_of_sampled: float | None = None
    ppl_of_sampled_low: float | None = None
    ppl_of_sampled_high: float | None = None
    delta_ppl_of_sampled: float | None = None
    delta_ppl_of_sampled_low: float | None = None
    delta_ppl_of_sampled_high: float | None = None
    generated_protocol: str | None = None  # prompts, lengths, temperature
    scores: str | None = None  # of `selfspec eval`, each with its standard error
    scores_protocol: str | None = None
    skip_layers: str | None = None  # layers below E that do not draft
    draft_window: int | None = None  # last tokens of the context that drafts attend to
    trunk_share: float | None = None  # of the wall time under a profiler (`selfspec profile`): the layers that draft
    head_share: float | None = None  # the exit head
    gate_share: float | None = None  # taking a draft token, and asking the gate
    draft_share: float | None = None  # the rest of drafting
    verify_share: float | None = None  # the full model: verify passes and prefill
    sampler_share: float | None = None  # sampling, and accepting or rejecting drafts
    scheduler_share: float | None = None  # on a GPU while no kernel runs, as the next one
    detokenise_share: float | None = None  # text of the tokens, and making outputs
    host_share: float | None = None  # the GPU waits for the host inside the other parts
    idle_share: float | None = None  # nothing of the above, and the rest of an engine step
    arrivals: str | None = None  # of a load test: closed, poisson or bursty
    clients: int | None = None  # of a closed loop
    rate: float | None = None  # requests a second that arrive
    load_share: float | None = None  # the rate over what the baseline completes in a closed loop
    burst: int | None = None  # requests that arrive together
    load_seconds: float | None = None  # of one run, from the first request to the last token, median
    requests: int | None = None  # that ended well, of all runs
    failed_requests: int | None = None  # refused, broken off or without an output
    req_s: float | None = None  # requests that end in a second, median of the runs
    goodput: float | None = None  # requests a second that keep the limits below, median of the runs
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None
    e2e_limit_ms: float | None = None
    tpot_p99_first_ms: float | None = None  # of the first whole minute of a run of three minutes and more
    tpot_p99_last_ms: float | None = None  # of the last one
    rss_mib: float | None = None  # resident memory of the server's processes after the last run
    rss_growth_mib: float | None = None  # and by how much it grew since the end of the warm-up
    speculative: str | None = None  # of arm vllm: the method and its settings
    draft_sample_method: str | None = None  # probabilistic: drafts are drawn; empty: they are the likeliest tokens
    draft_weights_file: str | None = None  # that the copies came from; empty: they were rounded when the engine started
    read_first: bool | None = None  # false: steps are launched before the last one's tokens are read, at every load
    low_clients: int | None = None  # of `clients`, those that ask all the time; others in the first half of a period
    period: float | None = None  # seconds in which the number of clients goes down and up once
    frontend: str | None = None  # rust: vLLM's front end in Rust took the requests in; empty: its API server in Python
    point: str = ""  # id: the file results/runs/<id>.json


@dataclass
class AcceptRow:
    """Drafting of one arm, summed over the timed repeats; it belongs to the summary row of the same point."""

    run_id: str
    arm: str
    model: str
    E: int | None = None
    k: int | None = None
    head: str | None = None
    gate: str | None = None
    threshold: float | None = None
    batch: int | None = None
    rounds: int | None = None  # verify steps that had drafts (vLLM's counter)
    drafted: int | None = None  # tokens
    accepted: int | None = None  # tokens
    accepted_at: str | None = None  # tokens accepted at position 1..k, separated by spaces
    key: str = ""
    places: int | None = None  # that verify passes looked at (vLLM's counter)
    point: str = ""


COUNTED = ("rounds", "drafted", "accepted", "accepted_at", "places")
"""The columns of accept.tsv that are counters."""


def identity(cfg: RunConfig, layer: int | None = None) -> dict[str, Any]:
    """The columns that say what `cfg` measures.

    Args:
        layer: the exit layer that the engine chose, where `cfg.layer` is None.
    """
    work = cfg.workload
    columns: dict[str, Any] = {
        "arm": str(cfg.method), "model": cfg.model.name, "workload": work.name, "batch": work.batch,
        "input_len": work.input_len, "output_len": work.output_len, "temperature": work.temperature,
        "seed": cfg.seed, "repeats": cfg.repeats,
    }  # fmt: skip
    if cfg.load.kind:
        columns |= load_columns.asked_for(cfg.load)
    if cfg.method in EARLY_EXIT or cfg.method == "draft_model":
        columns["E"] = cfg.layer if cfg.layer is not None else layer
    if cfg.method in EARLY_EXIT:
        columns |= {"head": head_spec(cfg.head, columns["E"]).name, "vocab": cfg.vocab}
    if cfg.method in SPECULATIVE:
        columns |= {"k": cfg.k, "acceptance_length": cfg.acceptance_length}
        columns["runner"] = str(cfg.runner) if cfg.runner != "auto" else None
        columns["draft_sample_method"] = cfg.draft_sample_method if cfg.draft_sample_method != "greedy" else None
    if cfg.method == "vllm":
        columns["speculative"] = in_words(cfg.speculative)
    if cfg.method == "layer_skip":
        columns |= {"draft_weights": str(cfg.draft_weights)}
        columns |= {"skip_layers": draft_options(cfg).get("skip_layers"), "draft_window": cfg.draft_window}
        columns |= {"gate": str(cfg.gate.kind), "threshold": gate_threshold(cfg)}
        columns["draft_weights_file"] = _name_of(cfg.draft_weights_path)
        columns["read_first"] = None if cfg.read_first else False
    return columns


def _name_of(path: str | None) -> str | None:
    """A file's name without its folder."""
    return Path(path).name if path else None


def planned(cfg: RunConfig, key: str | None = None) -> Record:
    """A row that says what `cfg` would measure, with no measurement in it."""
    return Record(run_id="", time="", key=run_key(cfg) if key is None else key, **identity(cfg))


def row(point: Point) -> Record:
    """The row of a point."""
    copies = _name_of((point.config or {}).get("draft_weights_path"))  # for points from before there was the column
    record = Record(
        run_id=point.run_id,
        time=point.time,
        **({"draft_weights_file": copies} | point.arm),
        device=point.device,
        status=OK if point.ok else f"{FAILED}: {point.reason}",
        key=point.key,
        model_fingerprint=point.digests.get("model"),
        point=point.id,
    )
    against = point.compared_with
    if against is not None:
        record = replace(record, baseline=against.baseline, baseline_reused=against.reused)
    if point.figures is not None:
        record = replace(record, **{name: point.figures[name] for name in header(Record) if name in point.figures})
    elif point.ok:
        record = _measured(record, point)
    return replace(record, **point.quality)


def accept_row(point: Point) -> AcceptRow | None:
    """The drafting of a point; None where nothing drafted, or it was not kept."""
    verified, drafted = drafting(point)
    kept = point.figures or {}
    counted: dict[str, Any] = {name: kept[name] for name in COUNTED if name in kept}
    if verified is not None:
        at = " ".join(map(str, verified.accepted_at))
        counted = dict(zip(COUNTED, (verified.rounds, drafted, verified.accepted, at, verified.places), strict=True))
    if not counted:
        return None
    known = {name: point.arm[name] for name in header(AcceptRow) if name in point.arm}
    return AcceptRow(run_id=point.run_id, **known, **counted, key=point.key, point=point.id)


def drafting(point: Point) -> tuple[VerifyCounts | None, int | None]:
    """vLLM's counters over all repeats, and the tokens drafted: the draft loop's own count, or the places verified of a
    drafter that keeps none (vLLM's own, which drafts what it verifies)."""
    verified = VerifyCounts.total(repeat.verified for repeat in point.repeats)
    if verified is None:
        return None, None
    own = counters.total(repeat.drafting for repeat in point.repeats)
    return verified, verified.places if own is None else own["drafted"]


def drafting_summary(point: Point) -> dict[str, Any] | None:
    """How the drafts of a point went (`counters.summary`); None where no draft loop counted."""
    if point.figures is not None:
        return point.figures.get("drafting")
    own = counters.total(repeat.drafting for repeat in point.repeats)
    verified, drafted = drafting(point)
    if own is None or verified is None:
        return None
    return counters.summary(own, verified.rounds, drafted or 0, verified.accepted)


def drafts_per_round(drafted: int, verified: VerifyCounts) -> float | None:
    """Draft tokens that a verify pass had before it, of one request; None without a round.

    The last drafts of a request are often never verified, so there are more of them than vLLM's rounds account for; on
    CUDA a pass looks at more places than were drafted. The fewer of the two are meant.
    """
    return min(drafted, verified.places) / verified.rounds if verified.rounds else None


def _measured(record: Record, point: Point) -> Record:
    """Every figure that follows from the raw values of a point."""
    against, engine = point.compared_with, point.engine
    facts: dict[str, Any] = {name: engine[name] for name in ENGINE_COLUMNS if engine.get(name) is not None}
    times: dict[str, Any] = latency.summary(request for repeat in point.repeats for request in repeat.requests)
    record = replace(record, ppl=point.perplexity, **facts, **times)
    if speeds := point.tok_s:
        record = replace(record, tok_s_median=median(speeds), tok_s_min=min(speeds), tok_s_max=max(speeds))
        record.speedup = 1.0 if point.arm["arm"] == "baseline" else None
    if against is not None:
        record = replace(record, speedup=against.speedup, speedup_low=against.low, speedup_high=against.high)
        if not record.temperature:  # what is sampled with drafts is another sample
            record = replace(record, identical=against.identical, outputs=against.outputs)
        if record.ppl is not None and against.perplexity is not None:
            record.delta_ppl = record.ppl - against.perplexity
    if record.arrivals is not None:
        record = replace(record, **load_columns.measured(point))
    return _with_prediction(_with_drafting(record, point), engine.get("step_bytes"))


ENGINE_COLUMNS = ("peak_mem_mib", "weights_mib", "kv_blocks", "sm_util", "dram_util", "power_w")


def _with_drafting(record: Record, point: Point) -> Record:
    verified, drafted = drafting(point)
    if verified is None or not verified.rounds or not drafted:
        return record
    return replace(
        record,
        accept_rate=verified.accepted / drafted,
        verified_accept_rate=verified.accepted / verified.places if verified.places else None,
        mean_accepted_len=1 + verified.accepted / verified.rounds,
        drafted_per_round=drafts_per_round(drafted, verified),
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


def header(kind: type) -> list[str]:
    """The column names, in order."""
    return [column.name for column in fields(kind)]


def meanings(kind: type) -> dict[str, str]:
    """What each column holds, as the comments beside them say."""
    found = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(kind), re.MULTILINE)
    return {name: meaning.strip() for name, meaning in found}


def header_line(kind: type) -> str:
    """The first line of a table's file."""
    return _line(header(kind), kind)


def line(made: Record | AcceptRow) -> str:
    """One row as a line of its file."""
    return _line([_cell(getattr(made, name)) for name in header(type(made))], type(made))


def text(kind: type, rows: Iterable[Record | AcceptRow]) -> str:
    """A whole file."""
    return "".join([header_line(kind), *map(line, rows)])


def _line(cells: list[str], kind: type) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter="\t" if kind is AcceptRow else ",", lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())  # a newline inside a cell would break whole-line appends
    return text.encode("utf-8", "backslashreplace").decode()  # the bytes of a file name may be no UTF-8
