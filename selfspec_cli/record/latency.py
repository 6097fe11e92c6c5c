"""Latencies from the raw times of requests, by the definitions of vLLM's own benchmark (`vllm bench serve`).

TTFT is the time from a request's arrival to its first output; end-to-end time the time to its last; TPOT is (end-to-end
time - TTFT) / (output tokens - 1), one value a request; ITL is the time between two successive outputs, one value for
each output but the first. An output may hold several tokens where drafts were accepted, so ITL is longer than TPOT
there. Of a request of one token there is no TPOT and no ITL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

QUANTILES = (50, 90, 99)  # per cent


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to one request, in seconds since the repeat that it belongs to began.

    events: the arrival of each output, in order; each holds one or more tokens. tokens: generated in all.
    """

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


def summary(requests: Iterable[RequestTimes]) -> dict[str, float]:
    """Columns of a row, in milliseconds, over all requests together; what there is no value of is left out.

    ttft_ms, tpot_ms, itl_ms and e2e_ms are medians; ttft_p90_ms and ttft_p99_ms are percentiles, and so on.
    """
    known = list(requests)
    values = {
        "ttft": [ttft(request) for request in known],
        "tpot": [value for request in known if (value := tpot(request)) is not None],
        "itl": [value for request in known for value in itl(request)],
        "e2e": [end_to_end(request) for request in known],
    }
    columns: dict[str, float] = {}
    for name, seconds in values.items():
        if (found := quantiles(seconds)) is not None:
            columns |= dict(zip((f"{name}_ms", f"{name}_p90_ms", f"{name}_p99_ms"), found, strict=True))
    return columns
