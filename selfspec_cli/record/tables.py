"""Points as rows: what each column of `record.columns` holds for a point, and what each category of its prompts has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import EARLY_EXIT, SPECULATIVE, RunConfig, gate_threshold, head_spec
from selfspec_cli.config.speculative import in_words
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.contexts import context_of
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.early_exit.settings import OPTIONS, arm_settings
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.record import statistics
from selfspec_cli.record.columns import COUNTED, AcceptRow, Record, header, known
from selfspec_cli.record.point import FAILED, OK, Point, control
from selfspec_cli.record.statistics import speedup_interval


def identity(cfg: RunConfig, layer: int | None = None) -> dict[str, Any]:
    """The columns that say what `cfg` measures. layer: the one that the engine chose, where `cfg.layer` is None."""
    work = cfg.workload
    columns: dict[str, Any] = {"arm": str(cfg.method), "model": cfg.model.name, "workload": work.name}
    columns |= {name: getattr(work, name) for name in ("batch", "input_len", "output_len", "temperature")}
    columns |= {"seed": cfg.seed, "repeats": cfg.repeats}
    if cfg.load.kind:
        limits = {"ttft_limit_ms": cfg.load.ttft_limit, "tpot_limit_ms": cfg.load.tpot_limit}
        columns |= {"batch": None, "repeats": cfg.load.repeats, **load_patterns.columns(cfg.load), **limits}
    if cfg.method in EARLY_EXIT or cfg.method == "draft_model":
        columns["E"] = cfg.layer if cfg.layer is not None else layer
    if cfg.method in EARLY_EXIT:
        columns |= {"head": head_spec(cfg.head, columns["E"]).name, "vocab": cfg.vocab}
    if cfg.method in SPECULATIVE:
        columns |= {"k": cfg.k, "runner": str(cfg.runner) if cfg.runner != "auto" else None}
        columns |= known(dict.fromkeys(key for key, option in OPTIONS.items() if option.knob.arm) | arm_settings(cfg))
    if cfg.method == "vllm":
        columns["speculative"] = in_words(cfg.speculative)
    if cfg.method == "layer_skip":
        columns |= DraftView.of(cfg).columns()
        columns |= {"gate": str(cfg.gate.kind), "threshold": gate_threshold(cfg)}
    return columns


UNVERIFIED = ("baseline", "skip")  # arms without drafts that are verified


def planned(cfg: RunConfig, key: str | None = None) -> Record:
    """A row that says what `cfg` would measure, with no measurement in it."""
    return Record(run_id="", time="", key=run_key(cfg) if key is None else key, **known(identity(cfg)))


def of_arm(arm: Mapping[str, Any]) -> Record:
    """A row that names an arm by its columns, with no measurement in it."""
    return Record(run_id="", time="", **known(arm))


def row(point: Point) -> Record:
    config = point.config or {}
    older: dict[str, Any] = {}  # columns that came after some of the published points
    if path := config.get("draft_weights_path"):
        older["draft_weights_file"] = Path(path).name
    if config.get("method") == "layer_skip":
        older["length_table"] = config.get("length_table")
    record = Record(
        run_id=point.run_id,
        time=point.time,
        **known(older | point.arm),
        device=point.device,
        status=OK if point.ok else f"{FAILED}: {point.reason}",
        key=point.key,
        model_fingerprint=point.digests.get("model"),
        point=point.id,
    )
    if point.compared_with is not None:
        record = replace(record, baseline=point.compared_with.baseline)
    if point.figures is not None:
        record = replace(record, **{name: point.figures[name] for name in header(Record) if name in point.figures})
    elif point.ok:
        record = _measured(record, point)
    return with_delta(replace(record, **known(point.quality)))


def with_delta(record: Record) -> Record:
    """A row with ΔPPL of an arm that verifies its drafts: 0 where every output is the baseline's, else that of what it
    generates greedily, under the plain model, where `selfspec ppl` found it."""
    if record.delta_ppl is not None or record.arm in UNVERIFIED or record.status != OK:
        return record
    if record.outputs and record.identical == record.outputs:
        return replace(record, delta_ppl=0.0)
    ends = {f"delta_ppl{end}": getattr(record, f"delta_ppl_of_greedy{end}") for end in ("", "_low", "_high")}
    return replace(record, **ends)


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
    arm = {name: point.arm[name] for name in header(AcceptRow) if name in point.arm}
    return AcceptRow(run_id=point.run_id, **arm, **counted, key=point.key, point=point.id)


def drafting(point: Point) -> tuple[VerifyCounts | None, int | None]:
    """vLLM's counters over all repeats, and tokens drafted: the draft loop's own count, or else the places verified."""
    verified = VerifyCounts.total(repeat.verified for repeat in point.repeats)
    if verified is None:
        return None, None
    own = counters.total(repeat.drafting for repeat in point.repeats)
    return verified, verified.places if own is None else counters.made(own)


def drafting_summary(point: Point) -> dict[str, Any] | None:
    """How the drafts of a point went (`counters.summary`); None where no draft loop counted."""
    if point.figures is not None:
        return point.figures.get("drafting")
    own = counters.total(repeat.drafting for repeat in point.repeats)
    verified, drafted = drafting(point)
    if own is None or verified is None:
        return None
    return counters.summary(own, verified.rounds, drafted or 0, verified.accepted)


def _measured(record: Record, point: Point) -> Record:
    against, is_baseline = point.compared_with, point.arm["arm"] == "baseline"
    names = ENGINE_COLUMNS + (() if record.arrivals is None else LOAD_COLUMNS)
    values: dict[str, Any] = {name: point.engine[name] for name in names if point.engine.get(name) is not None}
    values |= known(statistics.summary(request for repeat in point.repeats for request in repeat.requests))
    values["ppl"] = point.perplexity
    if speeds := point.tok_s:
        values |= {"tok_s_median": median(speeds), "tok_s_min": min(speeds), "tok_s_max": max(speeds)}
        values["speedup"] = 1.0 if is_baseline else None
    same: tuple[int | None, int | None] | None = control(point) if is_baseline else None
    if against is not None:
        same = against.identical, against.outputs
        values |= {"speedup": against.speedup, "speedup_low": against.low, "speedup_high": against.high}
        if point.perplexity is not None and against.perplexity is not None:
            values["delta_ppl"] = point.perplexity - against.perplexity
    if same is not None and not record.temperature:  # what is sampled with drafts is another sample
        values["identical"], values["outputs"] = same
    if record.arrivals is not None and point.repeats:
        values["req_s"] = median([len(one.requests) / one.seconds for one in point.repeats])
        limits = point.arm.get("ttft_limit_ms"), point.arm.get("tpot_limit_ms")
        if any(limits):
            values["goodput"] = median(statistics.goodput(one.requests, one.seconds, *limits) for one in point.repeats)
    return _with_prediction(_with_drafting(replace(record, **values), point), point.engine.get("step_bytes"))


ENGINE_COLUMNS = ("peak_mem_mib", "weights_mib", "kv_blocks", "sm_util", "power_w", "cpu_own", "cpu_others")
LOAD_COLUMNS = ("clients", "rate", "input_len", "failed_requests")
"""Columns that `Point.engine` holds; those of a load test are reported by the server, or known before."""


def _with_drafting(record: Record, point: Point) -> Record:
    verified, drafted = drafting(point)
    if verified is None or not verified.rounds or not drafted:
        return record
    if record.free_drafts:
        own = counters.total(repeat.drafting for repeat in point.repeats) or {}
        record = replace(record, free_drafted=own.get("free_drafted"), free_accepted=own.get("free_accepted"))
    # The last drafts of a request are often never verified; on CUDA a pass looks at more places than were drafted.
    per_round = min(drafted, verified.places) / verified.rounds
    yielded = 1 + verified.accepted / verified.rounds
    rate = verified.accepted / drafted
    return replace(record, accept_rate=rate, mean_accepted_len=yielded, drafted_per_round=per_round)


def _with_prediction(record: Record, read: dict[str, float] | None) -> Record:
    """The cost model's speedup for the accepted length that was measured, a step's time taken as the bytes it reads.
    read: what `EarlyExitWorker.early_exit_step_bytes` answers; None where bytes do not tell the time."""
    if read is None or record.mean_accepted_len is None or record.drafted_per_round is None or record.speedup is None:
        return record
    if record.free_drafts:  # the model knows no drafts that cost nothing
        return record
    assert record.input_len is not None and record.output_len is not None and record.batch is not None
    tokens = record.input_len + record.output_len / 2  # of a request's context, on average over the generation
    costs = Costs.from_bytes(read, record.batch * tokens, record.batch * context_of(record).attended(tokens))
    predicted = costs.speedup(record.mean_accepted_len, record.drafted_per_round)
    return replace(record, predicted=predicted, efficiency=record.speedup / predicted)


SEARCHED = "slo"  # what `Point.engine` holds of a search for the greatest load that keeps limits (stages/load.py)


def searched(point: Point, row: Record) -> str | None:
    """What a search found, in words: the greatest load that keeps the limits; None for a point of no search."""
    found = point.engine.get(SEARCHED)
    if found is None:
        return None
    limits = ", ".join(found["limits"])
    if not found["kept"]:
        return f"no load that was tried keeps {limits} (the least: {asked(row)})"
    broken = found["broken_at"]
    next_load = "" if broken is None else f", and at {broken:.3g} no longer"
    unsure = "" if found["sure"] else "; too few requests to be sure of it"
    good = "" if row.goodput is None else f"; goodput {row.goodput:.3g} requests/s"
    return f"{asked(row)} keep {limits}{next_load}{unsure}{good}"


def asked(row: Record) -> str:
    """How much is asked of an engine at once, in words."""
    return f"batch {row.batch}" if row.arrivals is None else load_patterns.label(row)


def category_rows(points: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Every category of every point that has some, as a row. point: its id. category, requests, tpot_ms. tok_s: median
    of the runs. speedup, low, high: over the baseline's tok_s of the same category, with the 95 % interval; None
    without a baseline. tok_step: tokens that a step yields. accepted: share of steps that kept the first draft, the
    first two, ..."""
    by_id = {point.id: point for point in points}
    for point in by_id.values():
        base = by_id.get(point.compared_with.baseline) if point.compared_with is not None else None
        theirs = {} if base is None else base.engine.get("categories") or {}
        for name, ours in (point.engine.get("categories") or {}).items():
            yield {"point": point.id, "category": name} | _compared(ours, theirs.get(name) or {})


def _compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    speeds, others = ours.get("tok_s") or [], theirs.get("tok_s") or []
    speedup, (low, high) = None, (None, None)
    if speeds and others:
        speedup = median(speeds) / median(others)
        low, high = speedup_interval(speeds, others) or (None, None)
    steps, accepted_at = ours.get("steps"), ours.get("accepted_at") or []
    return {
        "requests": ours["requests"],
        "tok_s": median(speeds) if speeds else None,
        "speedup": speedup,
        "low": low,
        "high": high,
        "tok_step": 1 + sum(accepted_at) / steps if steps else None,
        "accepted": [count / steps for count in accepted_at] if steps else [],
        "tpot_ms": ours.get("tpot_ms"),
    }
