"""The greatest load at which a server keeps limits of latency (an SLO), found by bisection.

Each load is asked until the 95 % interval of the share of requests within the limit (Clopper and Pearson, requests
taken as independent) lies on one side of the share asked for, or for `load.repeats` runs; then the share itself
decides, and the verdict is marked as not sure. A request that failed is within no limit.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.engine.clients import Run
from selfspec_cli.engine.server import Server
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import latency
from selfspec_cli.record.intervals import LEVEL
from selfspec_cli.record.latency import RequestTimes
from selfspec_cli.record.point import Measurement, median
from selfspec_cli.record.tables import SEARCHED
from selfspec_cli.stages.load import Loader

VALUES: dict[str, Callable[[RequestTimes], float | None]] = {
    "ttft": latency.ttft,
    "tpot": latency.tpot,
    "e2e": latency.end_to_end,
}
"""What a limit can be about, in seconds of a request."""
NAMES = tuple(f"{name}_p{percent}" for name in VALUES for percent in (50, 90, 95, 99))
NEAR = 0.05  # of a load, how far above it the least load that breaks a limit may lie
HALVINGS = 10  # of the first load, before it is said that no load keeps the limits
MOST = 4096.0  # times the first load


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


def as_searches(cfgs: Sequence[RunConfig], words: Sequence[str]) -> list[RunConfig]:
    """Two searches for each config, of a number of clients and of a rate; goodput counts by the same limits. words: the
    limits; without any, the configs themselves. Raises ConfigError: a limit cannot be read, or a config has a load."""
    if not words:
        return list(cfgs)
    limits, found = parse(words), []
    for cfg in cfgs:
        if cfg.load.kind:
            raise ConfigError(
                f"--slo with load.{'clients' if cfg.load.clients is not None else 'rate'}: it finds the load itself; "
                "leave one of them out"
            )
        load = replace(cfg.load, slo=" ".join(words))
        for name in ("ttft", "tpot"):  # by which goodput counts
            least = min((limit.ms for limit in limits if limit.name == name), default=None)
            if getattr(load, f"{name}_limit") is None:
                setattr(load, f"{name}_limit", least)
        found += [replace(cfg, load=replace(load, clients=1)), replace(cfg, load=replace(load, rate=1.0))]
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
    return Verdict(kept, surely if kept else broken)


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
    served: requests a second of each server at its greatest number of clients, where the search of its rate begins."""

    loader: Loader
    served: dict[str, float] = field(default_factory=dict)

    def __call__(self, cfg: RunConfig, server: Server, progress: Progress = ignore) -> Measurement:
        """Search the number of clients or the rate, whichever the config has, from its value on; what was measured at
        the greatest load that keeps the limits (at the least tried, where none does). Without limits a config is
        measured as it is."""
        if cfg.load.slo is None:
            return self.loader(cfg, server, progress)
        limits, whole = parse(cfg.load.slo.split()), cfg.load.clients is not None
        name, start = ("clients", 1.0) if whole else ("rate", self.served.get(server.url, cfg.load.rate or 1.0))
        measured: dict[float, Measurement] = {}
        verdicts: dict[float, Verdict] = {}

        def decided(runs: Sequence[Run]) -> bool:
            requests = [one for run in runs for one in run.times()]
            return judge(limits, requests, sum(len(run.failed) for run in runs)).sure

        def keeps(load: float) -> bool:
            value: Any = int(load) if whole else load
            asked = replace(cfg, load=replace(cfg.load, **{name: value}))
            found = measured[load] = self.loader(asked, server, progress, decided)
            if found.engine.get("interrupted"):
                raise KeyboardInterrupt
            requests = [one for repeat in found.repeats for one in repeat.requests]
            verdicts[load] = judge(limits, requests, found.engine.get("failed_requests", 0))
            return verdicts[load].kept

        low, high = greatest(keeps, start, whole=whole)
        chosen = min(measured) if low is None else low
        found = measured[chosen]
        if whole and low is not None:
            self.served[server.url] = median([len(one.requests) / one.seconds for one in found.repeats])
        facts = {
            "limits": list(map(str, limits)),
            "kept": low is not None,
            "broken_at": high,
            "sure": all(verdicts[load].sure for load in (low, high) if load is not None),
            "tried": [[load, verdict.kept, verdict.sure] for load, verdict in verdicts.items()],
        }
        return replace(found, engine=found.engine | {name: int(chosen) if whole else chosen, SEARCHED: facts})
