"""An engine that computes nothing: it takes one step at a time, and the time of a step is a curve over its requests."""

from __future__ import annotations

import json
import lzma
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

ROOT = Path(__file__).parents[2]
CHUNK = 2048  # prompt tokens of one step


def on_curve(points: Sequence[tuple[float, float]], running: float) -> float:
    """The value at `running` requests of a curve through (requests, value): straight lines in logarithms."""
    place = min(max(1, sum(running >= level for level, _ in points)), len(points) - 1)
    (low, less), (high, more) = points[place - 1 : place + 1]
    return less * (more / less) ** (math.log(max(running, points[0][0]) / low) / math.log(high / low))


@dataclass(eq=False)
class Job:
    """A request. prefill: tokens of its prompt that are still to be read. left: tokens of its answer still to come."""

    prefill: float
    left: int
    of: Any = None


@dataclass
class Engine:
    """One step at a time: the next prompts are read, and every other request gets the tokens of one round.

    seconds: time of a step, by the number of requests in it. rate: prompt tokens read per second, which comes on top.
    k, acceptance: drafts of a round, and the probability that the next one is accepted. cost: of a draft step, in plain
    steps. slots: requests at once; more of them wait.
    """

    seconds: Callable[[int], float]
    rate: float = 5000.0
    k: int = 0
    acceptance: float = 0.0
    cost: float = 0.0
    slots: int = 1 << 20
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    jobs: list[Job] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("drafts", "accepted", "rounds", "steps"), 0))
    _step: list[tuple[Job, bool]] = field(default_factory=list)  # whether it gets no more than its first token

    @property
    def tokens(self) -> float:
        """Tokens that a round brings, on average."""
        return sum(self.acceptance**place for place in range(self.k + 1))

    @property
    def work(self) -> float:
        """What a round costs, in plain steps."""
        return 1.0 + self.cost * self.k

    def begin(self) -> float | None:
        """Seconds that the step takes which begins now; None where there is nothing to do."""
        self._step, room, read = [], float(CHUNK), 0.0
        for job in self.jobs[: self.slots]:
            part = min(job.prefill, room)
            if part or not job.prefill:
                self._step.append((job, part > 0))
            job.prefill -= part
            room, read = room - part, read + part
        return self.seconds(len(self._step)) + read / self.rate if self._step else None

    def end(self) -> list[tuple[Job, int]]:
        """The step has ended: (request, tokens that it got). Requests that have all their tokens are gone."""
        found, rounds = [], 0
        for job, first in self._step:
            if job.prefill or job not in self.jobs:
                continue
            accepted = 0
            if not first:
                accepted = next((place for place in range(self.k) if self.draw.random() >= self.acceptance), self.k)
                self.counts["accepted"] += accepted
                rounds += 1
            tokens = min(job.left, 1 + accepted)
            job.left -= tokens
            found.append((job, tokens))
        if self.k and rounds:
            self.counts["drafts"] += rounds
            self.counts["rounds"] += 1
            self.counts["steps"] += self.k
        self.jobs = [job for job in self.jobs if job.left]
        return found

    def running(self) -> int:
        """Requests that have a place."""
        return min(self.slots, len(self.jobs))

    def metrics(self, says: bool) -> str:
        """As a vLLM server's /metrics. says: what the next step is expected to take, too, as selfspec's controller."""
        lines: dict[str, float] = {
            "vllm:num_requests_running": self.running(),
            "vllm:num_requests_waiting": len(self.jobs) - self.running(),
        }
        if self.k:
            lines["vllm:spec_decode_num_drafts_total"] = self.counts["drafts"]
            lines["vllm:spec_decode_num_accepted_tokens_total"] = self.counts["accepted"]
            lines["vllm:selfspec_draft_rounds_total"] = self.counts["rounds"]
            lines["vllm:selfspec_draft_steps_total"] = self.counts["steps"]
            lines["vllm:selfspec_draft_cost"] = self.cost
        if says and self.running():
            lines["vllm:selfspec_expected_step_seconds"] = self.seconds(self.running())
        return "".join(f'{name}{{engine="0"}} {value}\n' for name, value in lines.items())


# ---- as published ----------------------------------------------------------------------------------------------------

PUBLISHED = ROOT / "results" / "published" / "gpu" / "gpu_8b.jsonl.xz"
ARMS = {"early": "layer_skip", "draft_model": "draft_model", "plain": "baseline"}
"""Kinds of servers, and the arm of the published run on an H200 whose times they have."""
EACH, SLOTS = 8, 16  # measured requests in one stream, and streams at once: 128 requests, as there
RATE = 20_000.0  # prompt tokens a second: not measured there
EXIT_SHARE = 8 / 32  # of the layers of the 8B shape, that a draft step of early exit runs
DRAFT_SHARE = 0.3  # of a plain step, for a step of the draft model: only its product with the step's time is used


def published(kind: str) -> tuple[list[tuple[float, float]], int, float]:
    """(seconds of a step by requests, drafts of a round, tokens of a round) of a kind in `PUBLISHED`, short prompts."""
    points, k, tokens = [], 0, 1.0
    for line in lzma.decompress(PUBLISHED.read_bytes()).splitlines():
        row = json.loads(line)["data"]
        arm = row.get("arm") or {}
        if arm.get("arm") == ARMS[kind] and arm.get("workload") == "decode" and not arm.get("runner"):
            k, tokens = arm.get("k") or 0, row["figures"].get("mean_accepted_len") or 1.0
            points.append((float(arm["batch"]), row["figures"]["tpot_ms"] * tokens / 1000))
    return sorted(points), k, tokens


def as_published(kind: str, slower: float) -> Engine:
    """An engine with the step times of a kind of server on an H200. slower: that many times as long."""
    points, k, tokens = published(kind)
    acceptance = brentq(lambda share: sum(share**place for place in range(k + 1)) - tokens, 0, 1) if k else 0.0
    cost = EXIT_SHARE if kind == "early" else DRAFT_SHARE
    seconds = lambda running: slower * on_curve(points, EACH * running)  # noqa: E731
    return Engine(seconds, RATE / slower, k, acceptance, cost if k else 0.0, SLOTS)
