"""Measure a server under load: one arm at one load, as the bench of `sweep.run`.

Prompts, their order and the moments at which requests arrive are the same for all arms.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import baseline_of, digest
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.early_exit import counters
from selfspec_cli.engine import cores
from selfspec_cli.engine.clients import BUSY, ClientsError, Job, Run, check_installed, processes_for
from selfspec_cli.engine.clients import run as run_clients
from selfspec_cli.engine.deployment import ModelTokens
from selfspec_cli.engine.server import Server
from selfspec_cli.load_patterns.trace import PATTERN, Request, asked_requests, is_trace
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import categories, latency
from selfspec_cli.record.point import Measurement, Repeat, median
from selfspec_cli.texts import library, prompt_files
from selfspec_cli.texts.prompts import check_length, file_prompts, workload_prompts

FOLDER = "load"  # of raw samples, in the results folder
FEW = 8  # clients that warm up a server, and that ask where nothing says how much
ERRORS = 5  # kinds of failure that a point keeps
IDLE = 0.01  # share of a core below which a process of a server is not listed
LATE_MS = 20.0  # by which an open loop may fall behind its schedule before it is said
BLOCK = 512  # tokens of a block of Mooncake's traces


def asked(cfg: RunConfig) -> RunConfig:
    """`cfg` as a load test: the times of a trace, or a closed loop of FEW clients where nothing says how much to
    ask."""
    if is_trace(cfg.workload.prompts):
        return replace(cfg, load=replace(cfg.load, trace=cfg.workload.prompts))
    return cfg if cfg.load.kind else replace(cfg, load=replace(cfg.load, clients=FEW))


@dataclass(frozen=True)
class Prompts:
    """bodies: what each prompt says in the body of its request. categories: of each; empty where there are none. cut:
    requests of a trace that are longer than `workload.input_len` or `workload.output_len`."""

    bodies: list[dict[str, Any]]
    categories: list[str]
    cut: int = 0


def of_model(cfg: RunConfig) -> Prompts:
    """The prompts that every other command would give to the model of `cfg`, as token ids; raises ConfigError."""
    engine, work = ModelTokens(cfg), cfg.workload
    categories: list[str] = []
    requests: list[Request] = []
    if cfg.load.trace is None:
        bodies: list[dict[str, Any]] = [{"prompt": ids} for ids in workload_prompts(cfg, engine)]
        if prompt_files.is_prompt_file(work.prompts):
            categories = [prompt.category for prompt in file_prompts(cfg)]
    else:
        check_length(cfg, engine)
        requests = asked_requests(cfg.load)
        prompts = of_requests(requests, engine.encode, cfg.seed, work.input_len)
        bodies = [
            {"prompt": ids, "max_tokens": min(request.output_len, work.output_len)}
            for ids, request in zip(prompts, requests, strict=True)
        ]
    if work.temperature != 0:  # a seed each, so that both sides and every repeat draw alike
        bodies = [body | {"seed": cfg.seed + number} for number, body in enumerate(bodies)]
    cut = sum(request.input_len > work.input_len or request.output_len > work.output_len for request in requests)
    return Prompts(bodies, categories if any(categories) else [], cut)


def of_requests(
    requests: Sequence[Request], encode: Callable[[str], list[int]], seed: int, most: int
) -> list[list[int]]:
    """Return a prompt of held-out code for each request, of its length, cut to the first `most` tokens. Blocks with
    equal ids are equal in all prompts; what a request has no ids for is its own."""
    pool = [token for _, text in library.held_out_text() for token in encode(text)]

    def block(name: str) -> list[int]:
        start = random.Random(f"{seed} {name}").randrange(max(1, len(pool) - BLOCK))
        return pool[start : start + BLOCK]

    prompts = []
    for number, request in enumerate(requests):
        length = min(request.input_len, most)
        names = [f"block {name}" for name in request.blocks[: -(-length // BLOCK)]]
        names += [f"request {number}, {place}" for place in range(len(names), -(-length // BLOCK))]
        prompts.append([token for name in names for token in block(name)][:length])
    return prompts


@dataclass
class Loader:
    """Measures arms on servers; given to `sweep.run` as its bench. folder: of the raw samples of this command.
    saturation: requests a second that a baseline completed in a closed loop, by what was asked of it."""

    folder: Path
    saturation: dict[str, float] = field(default_factory=dict)
    _points: int = 0

    def __post_init__(self) -> None:
        check_installed()

    def __call__(
        self,
        cfg: RunConfig,
        server: Server,
        progress: Progress = ignore,
        decided: Callable[[Sequence[Run]], bool] = lambda runs: False,
    ) -> Measurement:
        """One arm at one load: warm-up, then every run, until the runs say enough (`decided`). A run that is cut short
        is kept. Raises ConfigError: no prompts; ClientsError: no request ended well; ServerError: the server ended;
        KeyboardInterrupt: before any request had ended."""
        began = time.perf_counter()
        self._points += 1
        place = self.folder / f"{self._points:03d}"
        prompts = of_model(cfg)
        cfg, facts = self._with_rate(cfg, server, prompts, place, progress)
        for number in range(cfg.warmup):
            _warm_up(cfg, server, prompts, place / f"warm-up-{number + 1}")
            progress("warm-up", number + 1, cfg.warmup)
        before, start = server.resident_mib(), cores.now()
        runs: list[Run] = []
        repeats: list[Repeat] = []
        for number in range(cfg.load.repeats):
            job, used = job_of(cfg, server, prompts, number), server.cpu_seconds()
            counts, own = server.verify_counts(), server.drafting()
            if cfg.load.kind == PATTERN.name and job.arrivals and job.arrivals[-1] > 0:
                facts["rate"] = (len(job.arrivals) - 1) / job.arrivals[-1]
            run = _run(server, job, place / f"repeat-{number + 1}", progress)
            facts |= {"interrupted": True} if run.interrupted else {}
            if run.good:
                # Of one core, what each of its processes used on average.
                shares = {name: (now - used.get(name, 0.0)) / run.seconds for name, now in server.cpu_seconds().items()}
                facts["server_cpu"] = {name: round(share, 3) for name, share in shares.items() if share > IDLE}
                after = server.verify_counts()
                verified = None if counts is None or after is None else after.since(counts)
                repeats.append(Repeat(run.seconds, run.times(), verified, counters.since(server.drafting(), own)))
                runs.append(run)
                progress("repeats", number + 1, cfg.load.repeats)
            if run.interrupted or decided(runs):
                break
        if not runs:
            raise KeyboardInterrupt
        facts |= _facts(runs, prompts, before, server, place) | cores.shares(start, cores.now())
        outputs = answers(runs[-1], len(prompts.bodies))
        return Measurement(tuple(repeats), outputs, engine=facts, seconds=time.perf_counter() - began)

    def _with_rate(
        self, cfg: RunConfig, server: Server, prompts: Prompts, place: Path, progress: Progress
    ) -> tuple[RunConfig, dict[str, Any]]:
        """The config with its rate in requests a second, where it is a share of what the baseline completes; the first
        arm that asks, which is the baseline, is the one that is measured for it."""
        load = cfg.load
        if load.share is None:
            return cfg, {}
        clients = load.clients or cfg.engine.max_num_seqs
        closed = replace(cfg, load=replace(load, clients=clients, share=None, burst=1))
        name = digest([to_plain(baseline_of(closed)), ""])
        if name not in self.saturation:
            _warm_up(closed, server, prompts, place / "warm-up-saturation")
            found = _uninterrupted(_run(server, job_of(closed, server, prompts), place / "saturation", progress))
            self.saturation[name] = len(found.good) / found.seconds
        full = self.saturation[name]
        facts = {"rate": load.share * full, "saturation_req_s": full, "saturation_clients": clients}
        return replace(cfg, load=replace(load, rate=load.share * full)), facts


def job_of(cfg: RunConfig, server: Server, prompts: Prompts, number: int = 0) -> Job:
    """The requests of one run. Every run of every arm sends the same prompts in the same order; each run of an arm has
    arrivals of its own, and run n of all arms the same ones."""
    load = cfg.load
    seconds = None if load.requests is not None else load.seconds
    base = _closed(cfg, server, prompts, load.clients, load.requests)
    arrivals = load.pattern.arrivals(load, 1000 * cfg.seed + number, load.requests, seconds)
    if arrivals is None:
        return replace(base, seconds=seconds, processes=processes_for(load.clients or 1))
    return replace(
        base, clients=None, requests=None, arrivals=arrivals, processes=processes_for(cfg.engine.max_num_seqs)
    )


def _closed(cfg: RunConfig, server: Server, prompts: Prompts, clients: int | None, requests: int | None) -> Job:
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": cfg.workload.output_len,
        "temperature": cfg.workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    return Job(server.url, body, prompts.bodies, clients=clients, requests=requests)


def _warm_up(cfg: RunConfig, server: Server, prompts: Prompts, place: Path) -> None:
    """Each client asks once, as many of them as the load may have at once; nothing of it is counted."""
    load = cfg.load
    clients = load.clients or max(load.burst, min(FEW, cfg.engine.max_num_seqs))
    _uninterrupted(_run(server, _closed(cfg, server, prompts, clients, clients), place, ignore))


def _run(server: Server, job: Job, place: Path, progress: Progress) -> Run:
    total = job.requests or len(job.arrivals or ())
    what, size = ("requests", total) if total else ("seconds", int(job.seconds or 0) + 1)

    def report(ended: int, gone: float) -> None:
        progress(what, min(ended if total else int(gone), size - 1), size)

    run = run_clients(job, place, check=server.check, progress=report)
    progress(what, size, size)
    if not run.good and not run.interrupted:
        raise ClientsError(f"no request ended well: {run.failed[0].error}")
    return run


def _uninterrupted(run: Run) -> Run:
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def _answers(runs: Sequence[Run], prompts: int) -> list[list[str]]:
    """Of each prompt the digests of its answers, in the order in which they were asked for."""
    found: list[list[str]] = [[] for _ in range(prompts)]
    for one in (request for run in runs for request in run.good):
        found[one.number % prompts].append(one.digest)
    return found


def answers(run: Run, prompts: int) -> tuple[str, ...]:
    """A digest of the first answer to each prompt, "" for one that was not answered; nothing without any answer."""
    return tuple(digests[0] if digests else "" for digests in _answers([run], prompts)) if run.good else ()


def unlike(runs: Sequence[Run], prompts: int) -> int:
    """Prompts that did not get one and the same answer each time that they were asked."""
    return sum(len(set(digests)) > 1 for digests in _answers(runs, prompts))


def _facts(runs: Sequence[Run], prompts: Prompts, before: float | None, server: Server, place: Path) -> dict[str, Any]:
    """What is known of a point besides its repeats, by names of columns where there are such."""
    samples = [request for run in runs for request in run.good]
    failed = [request for run in runs for request in run.failed]
    now = server.resident_mib()
    facts: dict[str, Any] = {
        "layer": server.layer,
        "kv_blocks": kv_blocks(server.metrics()),
        "failed_requests": len(failed),
        "errors": dict(Counter(str(request.error)[:120] for request in failed).most_common(ERRORS)),
        "unlike_answers": unlike(runs, len(prompts.bodies)),
        "client_cpu": max((run.cpu for run in runs if run.cpu is not None), default=None),
        "late_p99_ms": (latency.quantiles([request.late for request in samples]) or (0.0,))[-1],
        "rss_mib": now,
        "rss_growth_mib": None if now is None or before is None else now - before,
        "samples": str(place),
        "cut_requests": prompts.cut,
    }
    if kinds := prompts.categories:
        facts["categories"] = categories.measured(
            [
                [(kinds[one.number % len(kinds)], times, ()) for one, times in zip(run.good, run.times(), strict=True)]
                for run in runs
            ]
        )
    if lengths := [request.prompt_tokens for request in samples if request.prompt_tokens is not None]:
        facts["input_len"] = round(median(lengths))
    return facts


def kv_blocks(metrics: dict[str, dict[str, float]]) -> int | None:
    """Blocks of the KV cache, as vLLM's metrics say; None where they do not."""
    found = re.search(r'num_gpu_blocks="(\d+)"', " ".join(metrics.get("vllm:cache_config_info", {})))
    return int(found[1]) if found else None


def warnings(engine: dict[str, Any]) -> list[str]:
    """What a point's facts say against its figures."""
    found = []
    if engine.get("interrupted"):
        found.append("it was interrupted, and holds what had ended until then")
    if cut := engine.get("cut_requests"):
        found.append(f"{cut} requests of the trace are longer than workload.input_len or output_len, and were cut")
    if failed := engine.get("failed_requests"):
        counted = "; ".join(f"{count} times {error}" for error, count in engine.get("errors", {}).items())
        found.append(f"{failed} requests failed: {counted}")
    if (engine.get("client_cpu") or 0) > BUSY:
        found.append(f"the clients used {engine['client_cpu']:.0%} of a core: they, too, may be what was measured")
    if engine.get("late_p99_ms", 0.0) > LATE_MS:
        found.append(f"requests were sent up to {engine['late_p99_ms']:.0f} ms late (99th percentile)")
    return found
