"""The columns of a row that only a load test has. load_words.py says them in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.config.schema import LoadConfig
from selfspec_cli.record import latency
from selfspec_cli.record.point import Point, median

FROM_ENGINE = ("clients", "rate", "input_len", "failed_requests")
"""Columns that `Point.engine` holds: reported by the server, or known from what was measured before."""
FACT = "slo"
"""Name of what `Point.engine` holds of a search for the greatest load that keeps limits (stages/slo.py)."""


@dataclass
class Loads:
    """What a load test asked of a server, and what it found besides speed and latencies, which every point has."""

    arrivals: str | None = None  # of a load test: closed, poisson, bursty, or trace and the name of its file
    clients: int | None = None  # of a closed loop
    rate: float | None = None  # requests a second that arrive
    load_share: float | None = None  # the rate over what the baseline completes in a closed loop
    burst: int | None = None  # requests that arrive together
    failed_requests: int | None = None  # refused, broken off or without an output
    req_s: float | None = None  # requests that end in a second, median of the runs
    goodput: float | None = None  # requests a second that keep the stated limits of latency (`load.*_limit`),
    # median of the runs


def asked_for(load: LoadConfig) -> dict[str, Any]:
    """What a load test asks of a server."""
    return {
        "batch": None,
        "repeats": load.repeats,
        **load_patterns.columns(load),
        "ttft_limit_ms": load.ttft_limit,
        "tpot_limit_ms": load.tpot_limit,
    }


def limits(arm: dict[str, Any]) -> latency.Limits:
    """The limits of a point, by its arm's columns."""
    return latency.Limits(arm.get("ttft_limit_ms"), arm.get("tpot_limit_ms"))


def measured(point: Point) -> dict[str, Any]:
    """What a load test found, besides speed and latencies, which every point has."""
    found: dict[str, Any] = {name: point.engine[name] for name in FROM_ENGINE if point.engine.get(name) is not None}
    if not point.repeats:
        return found
    found["req_s"] = median([len(repeat.requests) / repeat.seconds for repeat in point.repeats])
    wanted = limits(point.arm)
    if wanted.any:
        found["goodput"] = median([latency.goodput(one.requests, one.seconds, wanted) for one in point.repeats])
    return found
