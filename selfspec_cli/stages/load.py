"""Measure a server under load: one arm at one load.

`selfspec load` runs as a sweep does (`sweep.run`): the baseline's server first, with every load, then the servers of
the arms; here is what takes the place of an engine's bench. Prompts, their order and the moments at which requests
arrive are the same for all of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import baseline_of, digest
from selfspec_cli.config.schema import RunConfig, to_plain
from selfspec_cli.early_exit import counters
from selfspec_cli.engine.clients import (
    BUSY,
    COMPLETIONS,
    ClientsError,
    Job,
    Run,
    check_installed,
    processes_for,
)
from selfspec_cli.engine.clients import run as run_clients
from selfspec_cli.engine.server import Server
from selfspec_cli.load_patterns.trace import PATTERN, is_trace
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import categories, latency
from selfspec_cli.record.point import Measurement, Repeat, median
from selfspec_cli.stages import cores
from selfspec_cli.stages.load_prompts import Prompts, of_model

FOLDER = "load"  # of raw samples, in the results folder
FEW = 8  # clients that warm up a server, and that ask where nothing says how much
ERRORS = 5  # kinds of failure that a point keeps
IDLE = 0.01  # share of a core below which a process of a server is not listed
LATE_MS = 20.0  # by which an open loop may fall behind its schedule before it is said


def asked(cfg: RunConfig) -> RunConfig:
    """`cfg` as a load test: the times of a trace if its prompts are one, and a closed loop of FEW clients where nothing
    says how much to ask."""
    if is_trace(cfg.workload.prompts):
        return replace(cfg, load=replace(cfg.load, trace=cfg.workload.prompts))
    return cfg if cfg.load.kind else replace(cfg, load=replace(cfg.load, clients=FEW))


@dataclass
class Loader:
    """Measures arms on servers; given to `sweep.run` as its bench.

    folder: of the raw samples of this command. saturation: requests a second that a baseline completed in a closed
    loop, by what was asked of it.
    """

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
        """One arm at one load: warm-up, then every run, until the runs say enough (`decided`). A run that an interrupt
        cuts short is kept as far as it came.

        Raises:
            ConfigError: the prompts cannot be had. ClientsError: no request ended well. ServerError: the server ended.
            KeyboardInterrupt: before any request had ended.
        """
        began = time.perf_counter()
        self._points += 1
        place = self.folder / f"{self._points:03d}"
        prompts = of_model(cfg)
        cfg, facts = self._with_rate(cfg, server, prompts, place, progress)
        for number in range(cfg.warmup):
            self._warm_up(cfg, server, prompts, place / f"warm-up-{number + 1}")
            progress("warm-up", number + 1, cfg.warmup)
        before, start = server.resident_mib(), cores.now()
        runs: list[tuple[Run, Repeat]] = []
        for number in range(cfg.load.repeats):
            job, used = self.job(cfg, server, prompts, number), server.cpu_seconds()
            if cfg.load.kind == PATTERN.name and job.arrivals and job.arrivals[-1] > 0:
                facts["rate"] = (len(job.arrivals) - 1) / job.arrivals[-1]
            run, repeat = self._timed(cfg, server, job, place / f"repeat-{number + 1}", progress)
            if repeat is not None:
                facts["server_cpu"] = _shares(used, server.cpu_seconds(), run.seconds)
                runs.append((run, repeat))
                progress("repeats", number + 1, cfg.load.repeats)
            if run.interrupted:
                facts["interrupted"] = True
            if run.interrupted or decided([one for one, _ in runs]):
                break
        if not runs:
            raise KeyboardInterrupt
        facts |= _facts([run for run, _ in runs], prompts, before, server, place)
        facts |= cores.shares(start, cores.now())
        return Measurement(
            repeats=tuple(repeat for _, repeat in runs),
            outputs=answers(runs[-1][0], len(prompts.bodies)),
            engine=facts,
            seconds=time.perf_counter() - began,
        )

    def job(self, cfg: RunConfig, server: Server, prompts: Prompts, number: int) -> Job:
        """The requests of one run. Every run of every arm sends the same prompts in the same order; each run of an arm
        has arrivals of its own, and run n of all arms the same ones."""
        load = cfg.load
        base = self._job(cfg, server, prompts)
        seconds = None if load.requests is not None else load.seconds
        asked = load.pattern.schedule(load, 1000 * cfg.seed + number, load.requests, seconds)
        if asked.arrivals is not None:
            return replace(base, arrivals=asked.arrivals, processes=processes_for(cfg.engine.max_num_seqs))
        return replace(
            base,
            clients=asked.clients,
            requests=load.requests,
            seconds=seconds,
            processes=processes_for(asked.clients or 1),
        )

    def _job(self, cfg: RunConfig, server: Server, prompts: Prompts) -> Job:
        body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": cfg.workload.output_len,
            "temperature": cfg.workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return Job(server.url, COMPLETIONS, body, prompts.bodies)

    def _warm_up(self, cfg: RunConfig, server: Server, prompts: Prompts, place: Path) -> None:
        """Each client asks once, as many of them as the load may have at once; nothing of it is counted."""
        load = cfg.load
        clients = load.clients or max(load.pattern.at_once(load), min(FEW, cfg.engine.max_num_seqs))
        job = replace(self._job(cfg, server, prompts), clients=clients, requests=clients)
        _uninterrupted(self._run(cfg, server, job, place, ignore))

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
            self._warm_up(closed, server, prompts, place / "warm-up-saturation")
            job = self.job(closed, server, prompts, 0)
            found = _uninterrupted(self._run(cfg, server, job, place / "saturation", progress))
            self.saturation[name] = len(found.good) / found.seconds
        full = self.saturation[name]
        facts = {"rate": load.share * full, "saturation_req_s": full, "saturation_clients": clients}
        return replace(cfg, load=replace(load, rate=load.share * full)), facts

    def _timed(
        self, cfg: RunConfig, server: Server, job: Job, place: Path, progress: Progress
    ) -> tuple[Run, Repeat | None]:
        """One run, with what the server counted meanwhile; no repeat for one in which nothing ended before it was
        interrupted."""
        counts, own = server.verify_counts(server.metrics()), server.drafting()
        run = self._run(cfg, server, job, place, progress)
        if not run.good and run.interrupted:
            return run, None
        after = server.verify_counts(server.metrics())
        verified = None if counts is None or after is None else after.since(counts)
        return run, Repeat(run.seconds, run.times(), verified, counters.since(server.drafting(), own))

    def _run(self, cfg: RunConfig, server: Server, job: Job, place: Path, progress: Progress) -> Run:
        total = job.requests or (len(job.arrivals) if job.arrivals is not None else 0)

        def report(ended: int, gone: float) -> None:
            if total:
                progress("requests", min(ended, total - 1), total)
            elif job.seconds is not None:
                progress("seconds", min(int(gone), int(job.seconds)), int(job.seconds) + 1)

        run = run_clients(job, place, check=server.check, progress=report)
        if total or job.seconds is not None:
            size = total or int(job.seconds or 0) + 1
            progress("requests" if total else "seconds", size, size)
        if not run.good and not run.interrupted:
            raise ClientsError(f"no request ended well: {run.failed[0].error}")
        return run


def _uninterrupted(run: Run) -> Run:
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def answers(run: Run, prompts: int) -> tuple[str, ...]:
    """A digest of the first answer to each prompt, "" for one that was not answered; nothing without any answer."""
    found: dict[int, str] = {}
    for one in run.good:
        found.setdefault(one.number % prompts, one.digest)
    return tuple(found.get(number, "") for number in range(prompts)) if found else ()


def unlike(runs: Sequence[Run], prompts: int) -> int:
    """Prompts that did not get one and the same answer each time that they were asked."""
    found: dict[int, set[str]] = {}
    for run in runs:
        for one in run.good:
            found.setdefault(one.number % prompts, set()).add(one.digest)
    return sum(len(digests) > 1 for digests in found.values())


def by_category(runs: Sequence[Run], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What was measured of each category; empty without categories. kinds: the category of each prompt."""
    if not kinds:
        return {}
    return categories.measured(
        [
            [(kinds[one.number % len(kinds)], times, ()) for one, times in zip(run.good, run.times(), strict=True)]
            for run in runs
        ]
    )


def _shares(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Of one core, what each process of a server used on average in a run; those that used next to nothing left out."""
    shares = {name: (used - before.get(name, 0.0)) / seconds for name, used in after.items()}
    return {name: round(share, 3) for name, share in shares.items() if share > IDLE}


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
    if (kinds := by_category(runs, prompts.categories)) != {}:
        facts["categories"] = kinds
    if not prompts.exact:
        prompt_lengths = [request.prompt_tokens for request in samples if request.prompt_tokens is not None]
        facts["input_len"] = round(median(prompt_lengths)) if prompt_lengths else None
    return facts


def kv_blocks(metrics: dict[str, dict[str, float]]) -> int | None:
    """Blocks of the KV cache, as vLLM's metrics say; None where they do not."""
    import re

    for labels in metrics.get("vllm:cache_config_info", {}):
        if found := re.search(r'num_gpu_blocks="(\d+)"', labels):
            return int(found[1])
    return None


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
