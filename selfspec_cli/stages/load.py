"""Measure a server under load: one arm at one load, as the bench of `sweep.run`; and find the greatest load at which it
keeps limits of latency (an SLO), by bisection.

Prompts, their order and the moments at which requests arrive are the same for all arms. Of a search each load is asked
until the 95 % interval of the share of requests within the limit (Clopper and Pearson, requests taken as independent)
lies on one side of the share asked for, or for `load.repeats` runs; then the share itself decides, and the verdict is
marked as not sure. A request that failed is within no limit.
"""

import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import baseline_of, digest
from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.engine import cores
from selfspec_cli.engine.clients import BUSY, ClientsError, Job, Run, processes_for
from selfspec_cli.engine.clients import run as run_clients
from selfspec_cli.engine.deployment import ModelTokens
from selfspec_cli.engine.server import Server
from selfspec_cli.load_patterns.trace import PATTERN, Request, asked_requests, is_trace
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import statistics
from selfspec_cli.record.point import Measurement, Repeat, median
from selfspec_cli.record.statistics import LEVEL, RequestTimes
from selfspec_cli.record.tables import SEARCHED
from selfspec_cli.texts import library, prompt_files
from selfspec_cli.texts.prompts import check_length, file_prompts, workload_prompts

FOLDER = "load"  # of raw samples, in the results folder
FEW = 8  # clients that warm up a server, and that ask where nothing says how much
ERRORS = 5  # kinds of failure that a point keeps
IDLE = 0.01  # share of a core below which a process of a server is not listed
LATE_MS = 20.0  # by which an open loop may fall behind its schedule before it is said
BLOCK = 512  # tokens of a block of Mooncake's traces


def asked(cfg: RunConfig) -> RunConfig:
    """`cfg` as a load test: the times of a trace, or a closed loop of FEW clients where nothing says how much."""
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


def of_requests(trace: Sequence[Request], encode: Callable[[str], list[int]], seed: int, most: int) -> list[list[int]]:
    """Return a prompt of held-out code for each request, of its length, cut to the first `most` tokens. Blocks with
    equal ids are equal in all prompts; what a request has no ids for is its own."""
    pool = [token for _, text in library.held_out_text() for token in encode(text)]

    def block(name: str) -> list[int]:
        start = random.Random(f"{seed} {name}").randrange(max(1, len(pool) - BLOCK))
        return pool[start : start + BLOCK]

    prompts = []
    for number, request in enumerate(trace):
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
        if find_spec("locust") is None:  # a server would start for minutes before its clients could not
            raise ModuleNotFoundError("No module named 'locust'", name="locust")

    def __call__(
        self,
        cfg: RunConfig,
        server: Server,
        progress: Progress = ignore,
        decided: Callable[[Sequence[Run]], bool] = lambda runs: False,
    ) -> Measurement:
        """One arm at one load: warm-up, then runs until they say enough (`decided`); one that is cut short is kept.
        Raises ConfigError: no prompts; ClientsError: no good request; ServerError: it ended; KeyboardInterrupt."""
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
        """The config with its rate in requests/s; a share is of what the first arm, the baseline, completes."""
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
    """The requests of one run: the same prompts in the same order; arrivals differ by run, and not by arm."""
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
        "late_p99_ms": (statistics.quantiles([request.late for request in samples]) or (0.0,))[-1],
        "rss_mib": now,
        "rss_growth_mib": None if now is None or before is None else now - before,
        "samples": str(place),
        "cut_requests": prompts.cut,
    }
    if kinds := prompts.categories:
        facts["categories"] = statistics.by_category(
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


VALUES: dict[str, Callable[[RequestTimes], float | None]] = {
    "ttft": statistics.ttft,
    "tpot": statistics.tpot,
    "e2e": statistics.end_to_end,
}
"""What a limit can be about, in seconds of a request."""
NAMES = tuple(f"{name}_p{percent}" for name in VALUES for percent in (50, 90, 95, 99))
NEAR = 0.05  # of a load, how far above it the least load that breaks a limit may lie
HALVINGS = 10  # of the first load, before it is said that no load keeps the limits
MOST = 512.0  # times the first load


@dataclass(frozen=True)
class Limit:
    """name: of VALUES. percent: of the requests that must keep it. ms: the limit itself."""

    name: str
    percent: int
    ms: float

    def __str__(self) -> str:
        return f"{self.name.upper()} p{self.percent} ≤ {self.ms:g} ms"


def parse(words: Sequence[str]) -> list[Limit]:
    """Read limits such as ttft_p99=200 (milliseconds); raises ConfigError."""
    limits = []
    for word in words:
        key, _, text = word.partition("=")
        if key not in NAMES:
            raise ConfigError(f"--slo {word}: {closest(key, NAMES, 'limit')}; such as --slo ttft_p99=200")
        if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", text) or float(text) <= 0:
            raise ConfigError(f"--slo {word}: the limit is a number of milliseconds above 0, such as {key}=200")
        name, _, percent = key.partition("_p")
        limits.append(Limit(name, int(percent), float(text)))
    return limits


def each_slo(words: Sequence[str]) -> list[list[str]]:
    """The limits of each SLO: ttft_p99=200,500 and tpot_p99=15,30 are two. A limit of one value is in all of them;
    raises ConfigError where limits have unlike numbers of values."""
    parts = [word.partition("=") for word in words]
    limits = [[f"{key}{sign}{value}" for value in values.split(",")] for key, sign, values in parts]
    number = max(map(len, limits))
    for word, given in zip(words, limits, strict=True):
        if len(given) not in (1, number):
            raise ConfigError(f"--slo {word}: {len(given)} values; another limit has {number}; allowed: 1 or {number}")
    return [list(slo) for slo in zip(*(given * (number // len(given)) for given in limits), strict=True)]


def as_searches(cfgs: Sequence[RunConfig], words: Sequence[str]) -> list[RunConfig]:
    """Two searches for each config and SLO, of a number of clients and of a rate; goodput counts by the same limits.
    words: the limits; without any, the configs themselves. Raises ConfigError: a limit cannot be read, or a load is
    given."""
    if not words:
        return list(cfgs)
    found = []
    for cfg, named in product(cfgs, each_slo(words)):
        limits = parse(named)
        if cfg.load.kind:
            raise ConfigError(
                f"--slo with load.{'clients' if cfg.load.clients is not None else 'rate'}: it finds the load itself; "
                "leave one of them out"
            )
        load = replace(cfg.load, slo=" ".join(named))
        for name in ("ttft", "tpot"):  # by which goodput counts
            least = min((limit.ms for limit in limits if limit.name == name), default=None)
            if getattr(load, f"{name}_limit") is None:
                setattr(load, f"{name}_limit", least)
        found += [replace(cfg, load=replace(load, clients=FEW)), replace(cfg, load=replace(load, rate=1.0))]
    return found


@dataclass(frozen=True)
class Verdict:
    """Whether a load keeps all limits, and whether the intervals say so."""

    kept: bool
    sure: bool


def judge(limits: Sequence[Limit], requests: Sequence[RequestTimes], failed: int) -> Verdict:
    """Whether requests keep the limits. failed: others that failed."""
    from scipy.stats import binomtest

    kept, surely, broken = True, True, False
    for limit in limits:
        values = [value for one in requests if (value := VALUES[limit.name](one)) is not None]
        within, asked = sum(1000 * value <= limit.ms for value in values), len(values) + failed
        if not asked:
            continue
        wanted = limit.percent / 100
        interval = binomtest(within, asked).proportion_ci(LEVEL)
        kept &= within / asked >= wanted
        surely &= interval.low >= wanted
        broken |= interval.high < wanted
    # Truth values of NumPy's, which some releases of SciPy lead to, cannot be written to a point.
    return Verdict(bool(kept), bool(surely if kept else broken))


def greatest(keeps: Callable[[float], bool], start: float, *, whole: bool) -> tuple[float | None, float | None]:
    """The greatest load that keeps the limits, and the least that was tried and does not; within NEAR, or 1 of whole
    numbers. None for a load that was not found. keeps: whether a load does, and less than that does if it does."""
    low: float | None = None
    high: float | None = None
    load = start
    while low is None or high is None:
        if keeps(load):
            low, load = load, 2 * load
            if high is None and load > MOST * start:
                return low, None
        else:
            high, load = load, load // 2 if whole else load / 2
            if low is None and (load < 1 if whole else load < start / 2**HALVINGS):
                return None, high
    while high - low > (1 if whole else 0) and high > (1 + NEAR) * low:
        middle = (low + high) // 2 if whole else math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low, high


@dataclass
class Search:
    """Finds the greatest load on a server where a config names limits; takes a `Loader`'s place as a sweep's bench.
    measured: of the server in use, by what was asked of it, so that another SLO's search asks only for other loads.
    served: requests a second at its first greatest number of clients, where searches of its rate begin."""

    loader: Loader
    measured: dict[str, Measurement] = field(default_factory=dict)
    served: float | None = None
    _server: Server | None = None

    def __call__(self, cfg: RunConfig, server: Server, progress: Progress = ignore) -> Measurement:
        """Search the number of clients or the rate, from the config's value on; the measurement at the greatest load
        that keeps the limits (the least tried, where none does). Without limits a config is measured as it is."""
        if cfg.load.slo is None:
            return self.loader(cfg, server, progress)
        if server is not self._server:
            self.measured, self.served, self._server = {}, None, server
        limits, whole = parse(cfg.load.slo.split()), cfg.load.clients is not None
        name, start = ("clients", float(FEW)) if whole else ("rate", self.served or cfg.load.rate or 1.0)
        found: dict[float, Measurement] = {}
        verdicts: dict[float, Verdict] = {}

        def decided(runs: Sequence[Run]) -> bool:
            requests = [one for run in runs for one in run.times()]
            return judge(limits, requests, sum(len(run.failed) for run in runs)).sure

        def verdict(one: Measurement) -> Verdict:
            requests = [times for repeat in one.repeats for times in repeat.requests]
            return judge(limits, requests, one.engine.get("failed_requests", 0))

        def keeps(load: float) -> bool:
            value: Any = int(load) if whole else load
            asked = replace(cfg, load=replace(cfg.load, **{name: value}))
            without = replace(asked, load=replace(asked.load, slo=None, ttft_limit=None, tpot_limit=None))
            key = digest(to_plain(without))
            known = self.measured.get(key)
            if known is None or not (verdict(known).sure or len(known.repeats) == cfg.load.repeats):
                known = self.measured[key] = self.loader(asked, server, progress, decided)
            if known.engine.get("interrupted"):
                raise KeyboardInterrupt
            found[load], verdicts[load] = known, verdict(known)
            return verdicts[load].kept

        low, high = greatest(keeps, start, whole=whole)
        chosen = min(found) if low is None else low
        best = found[chosen]
        if whole and low is not None and self.served is None:
            self.served = median([len(one.requests) / one.seconds for one in best.repeats])
        facts = {
            "limits": list(map(str, limits)),
            "kept": low is not None,
            "broken_at": high,
            "sure": all(verdicts[load].sure for load in (low, high) if load is not None),
            "tried": [[load, verdict.kept, verdict.sure] for load, verdict in verdicts.items()],
        }
        return replace(best, engine=best.engine | {name: int(chosen) if whole else chosen, SEARCHED: facts})
