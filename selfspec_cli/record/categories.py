"""What was measured of each category of prompts, and how it compares with the baseline's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from selfspec_cli.record import latency
from selfspec_cli.record.intervals import speedup_interval
from selfspec_cli.record.latency import RequestTimes
from selfspec_cli.record.point import Point

ALL = "all"
Request = tuple[str, RequestTimes, Sequence[int]]
"""The category of a request, its times, and the tokens of each of its outputs (empty if they are not known)."""


def measured(runs: Sequence[Sequence[Request]]) -> dict[str, dict[str, Any]]:
    """Figures of each category, by name, and of ALL requests.

    Returns:
        requests: of all runs. tok_s: tokens a second of a request, one value a run (tokens of all requests over the
        sum of their times). Medians and percentiles of latency in milliseconds (`latency.summary`). Where the tokens of
        outputs are known: steps after the first output, and accepted_at, how many of them kept at least 1, 2, ...
        drafts.
    """
    names = sorted({category for run in runs for category, _, _ in run})
    found = {}
    for name in [*names, ALL]:
        parts = [[one for one in run if name in (one[0], ALL)] for run in runs]
        everything = [times for part in parts for _, times, _ in part]
        figures: dict[str, Any] = {"requests": len(everything), "tok_s": [_tok_s(part) for part in parts if part]}
        if sizes := [size for part in parts for _, _, outputs in part for size in outputs[1:]]:
            accepted_at = [sum(size > place for size in sizes) for place in range(1, max(sizes))]
            figures |= {"steps": len(sizes), "accepted_at": accepted_at}
        found[name or "none"] = figures | latency.summary(everything)
    return found


def _tok_s(requests: Sequence[Request]) -> float:
    return sum(times.tokens for _, times, _ in requests) / sum(latency.end_to_end(times) for _, times, _ in requests)


def rows(points: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Every category of every point that has some, as a row.

    point: its id. category, requests, tpot_ms. tok_s: median of the runs. speedup, low, high: over the baseline's
    tok_s of the same category, with the 95 % interval; None without a baseline among the points. tok_step: tokens that
    a step yields. accepted: share of the steps that kept the first draft, the first two, ...
    """
    by_id = {point.id: point for point in points}
    for point in by_id.values():
        base = by_id.get(point.compared_with.baseline) if point.compared_with is not None else None
        theirs = {} if base is None else base.engine.get("categories") or {}
        for name, ours in (point.engine.get("categories") or {}).items():
            yield {"point": point.id, "category": name} | _row(ours, theirs.get(name) or {})


def _row(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
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
