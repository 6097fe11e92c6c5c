"""What a vLLM server says of itself at /metrics, as far as routes are chosen by it."""

from __future__ import annotations

import re
from contextlib import suppress
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
    "vllm:selfspec_draft_length": "draft_length",
    "vllm:selfspec_expected_step_seconds": "step",
}
STATES = ("draft_cost", "draft_length", "step")
MOST = 1e15  # that anything may be counted
ROUNDS = 100  # of drafting, over which the tokens that a round brings are a mean
_LINE = re.compile(rf"^({'|'.join(_NAMES)})(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)


Counts = dict[str, float]
"""Totals since the server began, and gauges as they are, by the names of _NAMES; without what it does not say."""


def read(text: str) -> Counts:
    """The counts of Prometheus's text format: the sum over the engines of a server, of STATES the largest. What is no
    count is left out."""
    found: Counts = {}
    for name, value in _LINE.findall(text):
        key, number = _NAMES[name], -1.0
        with suppress(ValueError):
            number = float(value)
        if 0 <= number < MOST:
            found[key] = max(found.get(key, 0.0), number) if key in STATES else found.get(key, 0.0) + number
    return found


@dataclass(frozen=True)
class Load:
    """The state of a server: requests, and what a round of drafting costs (work, in plain steps) and brings (tokens).

    rounds: that `tokens` is a mean of. step: seconds that the server expects its next step to take; None where it does
    not say, or does not draft at the moment, so that the step is no round.
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
    rounds: float = 0.0


def between(before: Counts | None, now: Counts, last: Load) -> Load:
    """The load by two looks; where no round ended between them, what a round costs and brings stays as it was. Few
    rounds say little of what one brings, so they count as much as others before them."""
    work, tokens, counted = last.work, last.tokens, last.rounds
    rounds = _more(before, now, "drafts")
    if rounds:
        counted = min(ROUNDS, last.rounds + rounds)
        brought = 1.0 + (_more(before, now, "accepted") or 0.0) / rounds
        tokens += min(1.0, rounds / counted) * (brought - tokens)
        ours, steps, cost = _more(before, now, "draft_rounds"), _more(before, now, "draft_steps"), now.get("draft_cost")
        if ours and steps is not None and cost is not None:
            work = 1.0 + cost * steps / ours
    caches, step = now.get("prefix_queries") != 0, now.get("step") if now.get("draft_length") != 0 else None
    running, waiting = now.get("running", 0.0), now.get("waiting", 0.0)
    return Load(running, waiting, work, tokens, "drafts" in now, caches, "running" in now, step or None, counted)


def _more(before: Counts | None, now: Counts, name: str) -> float | None:
    """By how much a total grew; None where it is not there. A server that was started anew begins at 0."""
    later, earlier = now.get(name), (before or {}).get(name)
    return later if later is None or earlier is None or later < earlier else later - earlier
