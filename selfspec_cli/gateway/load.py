"""What a vLLM server says of itself at /metrics, as far as routes are chosen by it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:selfspec_draft_rounds_total": "draft_rounds",
    "vllm:selfspec_draft_steps_total": "draft_steps",
    "vllm:selfspec_draft_cost": "draft_cost",
    "vllm:selfspec_expected_step_seconds": "step",
}
STATES = ("draft_cost", "step")
_LINE = re.compile(rf"^({'|'.join(_NAMES)})(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Counts:
    """Totals since the server began, and gauges as they are; None for what it does not say."""

    running: float | None = None
    waiting: float | None = None
    prefix_queries: float | None = None
    drafts: float | None = None
    accepted: float | None = None
    draft_rounds: float | None = None
    draft_steps: float | None = None
    draft_cost: float | None = None
    step: float | None = None


def read(text: str) -> Counts:
    """The counts of Prometheus's text format: the sum over the engines of a server, of STATES the largest."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        key, number = _NAMES[name], float(value)
        found[key] = max(found.get(key, 0.0), number) if key in STATES else found.get(key, 0.0) + number
    return Counts(**found)


@dataclass(frozen=True)
class Load:
    """The state of a server: requests, and what a round of drafting costs (work, in plain steps) and brings (tokens).

    step: seconds that the server expects its next step to take; None where it does not say.
    known: whether it says anything at all. drafts: whether it can draft. caches: whether its prefix cache is used.
    """

    running: float = 0.0
    waiting: float = 0.0
    work: float = 1.0
    tokens: float = 1.0
    drafts: bool = False
    caches: bool = True
    known: bool = False
    step: float | None = None


def between(before: Counts | None, now: Counts, last: Load) -> Load:
    """The load by two looks; where no round ended between them, what a round costs and brings stays as it was."""
    work, tokens = last.work, last.tokens
    rounds = _more(before, now, "drafts")
    if rounds:
        tokens = 1.0 + (_more(before, now, "accepted") or 0.0) / rounds
        ours, steps = _more(before, now, "draft_rounds"), _more(before, now, "draft_steps")
        if ours and steps is not None and now.draft_cost is not None:
            work = 1.0 + now.draft_cost * steps / ours
    caches = now.prefix_queries is None or now.prefix_queries > 0
    drafts, known = now.drafts is not None, now.running is not None
    return Load(now.running or 0.0, now.waiting or 0.0, work, tokens, drafts, caches, known, now.step or None)


def _more(before: Counts | None, now: Counts, name: str) -> float | None:
    """By how much a total grew; None where it is not there. A server that was started anew begins at 0."""
    later = getattr(now, name)
    earlier = None if before is None else getattr(before, name)
    if later is None:
        return None
    return float(later - earlier) if earlier is not None and later >= earlier else float(later)
