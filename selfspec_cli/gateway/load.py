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


Counts = dict[str, float]
"""Totals since the server began, and gauges as they are, by the names of _NAMES; without what it does not say."""


def read(text: str) -> Counts:
    """The counts of Prometheus's text format: the sum over the engines of a server, of STATES the largest."""
    found: Counts = {}
    for name, value in _LINE.findall(text):
        key, number = _NAMES[name], float(value)
        found[key] = max(found.get(key, 0.0), number) if key in STATES else found.get(key, 0.0) + number
    return found


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
        ours, steps, cost = _more(before, now, "draft_rounds"), _more(before, now, "draft_steps"), now.get("draft_cost")
        if ours and steps is not None and cost is not None:
            work = 1.0 + cost * steps / ours
    caches, step = now.get("prefix_queries") != 0, now.get("step") or None
    running, waiting = now.get("running", 0.0), now.get("waiting", 0.0)
    return Load(running, waiting, work, tokens, "drafts" in now, caches, "running" in now, step)


def _more(before: Counts | None, now: Counts, name: str) -> float | None:
    """By how much a total grew; None where it is not there. A server that was started anew begins at 0."""
    later, earlier = now.get(name), (before or {}).get(name)
    return later if later is None or earlier is None or later < earlier else later - earlier
