"""Latencies from the raw times of requests, and how sure a speedup or a perplexity is.

Latencies are by the definitions of vLLM's own benchmark (`vllm bench serve`): TTFT is the time from a request's arrival
to its first output; end-to-end time the time to its last; TPOT is (end-to-end time - TTFT) / (output tokens - 1), one
value a request; ITL is the time between two successive outputs. An output may hold several tokens where drafts were
accepted, so ITL is longer than TPOT there. A request of one token has neither.

Intervals are by bootstrap: percentile intervals, not BCa, whose acceleration is a jackknife's, under which the median
of three to five repeats takes two or three values. With so few repeats an interval reaches about from the slowest to
the fastest pair, and may cover less than its nominal 95 %.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

QUANTILES = (50, 90, 99)  # per cent
WINDOW = 60.0  # seconds of one window of a long run


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to one request, in seconds since the repeat that it belongs to began. events: the arrival of
    each output, in order; each holds one or more tokens. tokens: generated in all."""

    arrival: float
    events: tuple[float, ...]
    tokens: int


def ttft(request: RequestTimes) -> float:
    """Seconds to the first output."""
    return request.events[0] - request.arrival


def end_to_end(request: RequestTimes) -> float:
    """Seconds to the last output."""
    return request.events[-1] - request.arrival


def tpot(request: RequestTimes) -> float | None:
    """Seconds for each token after the first output; None for a single token."""
    return (end_to_end(request) - ttft(request)) / (request.tokens - 1) if request.tokens > 1 else None


def itl(request: RequestTimes) -> list[float]:
    """Seconds between successive outputs."""
    return [later - earlier for earlier, later in pairwise(request.events)]


def quantiles(seconds: Sequence[float]) -> tuple[float, ...] | None:
    """The 50th, 90th and 99th percentile in milliseconds, as `numpy.percentile` has them; None of nothing."""
    if not seconds:
        return None
    import numpy

    return tuple(1000 * float(value) for value in numpy.percentile(seconds, QUANTILES))


def by_name(requests: Iterable[RequestTimes]) -> dict[str, list[float]]:
    """The values of all requests together, in seconds: ttft, tpot, itl and e2e."""
    measured = list(requests)
    return {
        "ttft": [*map(ttft, measured)],
        "tpot": [value for value in map(tpot, measured) if value is not None],
        "itl": [value for request in measured for value in itl(request)],
        "e2e": [*map(end_to_end, measured)],
    }


def summary(requests: Iterable[RequestTimes]) -> dict[str, float]:
    """Columns of a row, in milliseconds, over all requests together; what there is no value of is left out. ttft_ms,
    tpot_ms, itl_ms and e2e_ms are medians; ttft_p90_ms and ttft_p99_ms are percentiles, and so on."""
    columns: dict[str, float] = {}
    for name, seconds in by_name(requests).items():
        if (percentiles := quantiles(seconds)) is not None:
            columns |= dict(zip((f"{name}_ms", f"{name}_p90_ms", f"{name}_p99_ms"), percentiles, strict=True))
    return columns


def goodput(
    requests: Iterable[RequestTimes], seconds: float, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> float:
    """Requests a second within both limits (ms), as of `vllm bench serve --goodput`; one token keeps any TPOT limit."""

    def kept(request: RequestTimes) -> bool:
        pairs = ((ttft_limit, ttft(request)), (tpot_limit, tpot(request)))
        return all(limit is None or value is None or 1000 * value <= limit for limit, value in pairs)

    return sum(map(kept, requests)) / seconds


def windows(requests: Iterable[RequestTimes], seconds: float) -> list[dict[str, float]]:
    """The whole windows of a run, in order. tok_s: tokens a second that arrived in it; the tokens of a request are
    spread evenly over its outputs, because an output does not say how many it holds. ttft, tpot: the 99th percentile in
    milliseconds over the requests that ended in it; left out where none did."""
    count = int(seconds / WINDOW + 1e-9)
    ended: list[list[RequestTimes]] = [[] for _ in range(count)]
    tokens = [0.0] * count
    for request in requests:
        for event in request.events:
            if event < count * WINDOW:
                tokens[int(event / WINDOW)] += request.tokens / len(request.events)
        if request.events[-1] < count * WINDOW:
            ended[int(request.events[-1] / WINDOW)].append(request)
    found = []
    for arrived, some in zip(tokens, ended, strict=True):
        tails = {name: quantiles(values) for name, values in by_name(some).items() if name in ("ttft", "tpot")}
        found.append({"tok_s": arrived / WINDOW} | {name: tail[-1] for name, tail in tails.items() if tail is not None})
    return found


ALL = "all"
Request = tuple[str, RequestTimes, Sequence[int]]
"""The category of a request, its times, and the tokens of each of its outputs (empty if they are not known)."""


def by_category(runs: Sequence[Sequence[Request]]) -> dict[str, dict[str, Any]]:
    """Figures of each category, by name, and of ALL requests. requests: of all runs. tok_s: tokens a second of a
    request, one value a run (tokens of all requests over the sum of their times). Medians and percentiles of latency in
    milliseconds (`summary`). Where the tokens of outputs are known: steps after the first output, and accepted_at, how
    many of them kept at least 1, 2, ... drafts."""
    names = sorted({category for run in runs for category, _, _ in run})
    found = {}
    for name in [*names, ALL]:
        parts = [[one for one in run if name in (one[0], ALL)] for run in runs]
        times = [[one[1] for one in part] for part in parts if part]
        tok_s = [sum(one.tokens for one in part) / sum(map(end_to_end, part)) for part in times]
        everything = [one for part in times for one in part]
        figures: dict[str, Any] = {"requests": len(everything), "tok_s": tok_s}
        if sizes := [size for part in parts for _, _, outputs in part for size in outputs[1:]]:
            accepted_at = [sum(size > place for size in sizes) for place in range(1, max(sizes))]
            figures |= {"steps": len(sizes), "accepted_at": accepted_at}
        found[name or "none"] = figures | summary(everything)
    return found


LEVEL = 0.95
RESAMPLES = 4999
SEED = 0  # the same repeats have the same interval, whenever it is worked out

Interval = tuple[float, float]


def speedup_interval(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> Interval | None:
    """The 95 % interval of median(ours) / median(theirs), tokens a second of the repeats of both sides; None where one
    side has fewer than two repeats, because nothing says how much it varies. paired: the sides took turns, so that
    repeat i of one is resampled with repeat i of the other, and not by itself."""
    return _bootstrap(_ratio_of_medians, (tuple(ours), tuple(theirs)), paired)


def perplexity_interval(*sides: Sequence[float]) -> Interval | None:
    """The 95 % interval of a perplexity, or of its difference to another one of the same documents; None for fewer than
    two documents. Documents are resampled, the same for both sides, never tokens, which depend on each other. sides:
    negative log-likelihood (nats) and scored tokens of each document; then, to take it away, likewise of the other."""
    return _bootstrap(_perplexity, tuple(map(tuple, sides)), True)


def overlap(one: Interval, other: Interval) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _ratio_of_medians(ours: Any, theirs: Any, axis: int) -> Any:
    import numpy

    return numpy.median(ours, axis=axis) / numpy.median(theirs, axis=axis)


def _perplexity(*sides: Any, axis: int) -> Any:
    import numpy

    nats, tokens, *others = [side.sum(axis=axis) for side in sides]
    ours = numpy.exp(nats / tokens)
    return ours - numpy.exp(others[0] / others[1]) if others else ours


@lru_cache(maxsize=4096)
def _bootstrap(statistic: Callable[..., Any], sides: tuple[tuple[float, ...], ...], paired: bool) -> Interval | None:
    if min(map(len, sides)) < 2:
        return None
    from scipy.stats import bootstrap

    # It takes the ends from the resampled statistics themselves: no normal approximation.
    interval = bootstrap(
        sides,
        statistic,
        n_resamples=RESAMPLES,
        paired=paired,
        vectorized=True,
        method="percentile",
        confidence_level=LEVEL,
        random_state=SEED,
    ).confidence_interval
    return float(interval.low), float(interval.high)
