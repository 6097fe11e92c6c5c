"""The cheapest backend whose answers to similar requests were good enough.

A request is a vector of its hashed character trigrams. The quality that a backend is expected to have is the mean of
what was judged (by clients, at /gateway/feedback) of the NEIGHBOURS most similar requests that it answered, weighted
by similarity, with TRUST judgements of the value PRIOR mixed in. Of the backends that reach `enough` the cheapest
is chosen; where none does, the best.

It loses to round robin where nobody judges answers: it then knows prices alone.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np
from pydantic.dataclasses import dataclass

from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import ONLY_KNOWN_KEYS, setting

SIZE = 256
KEPT = 2000  # judgements of each backend
SHARP = 4  # power of a similarity: texts that have only their language in common have about a half
NEIGHBOURS = 10  # most similar requests whose judgements count
PRIOR, TRUST = 0.8, 1.0  # quality where nothing is known, and how many judgements that weighs as much as


def features(text: str) -> np.ndarray:
    """Hashed character trigrams of a text, of length 1."""
    text = f" {text.lower()} "
    places = [zlib.crc32(text[at : at + 3].encode()) % SIZE for at in range(len(text) - 2)]
    counts = np.bincount(np.array(places, dtype=int), minlength=SIZE)
    return counts / (np.linalg.norm(counts) or 1.0)


@dataclass(frozen=True, config=ONLY_KNOWN_KEYS)
class Options:
    enough: float = setting(0.7, "quality of which the cheapest backend is taken", ge=0, le=1)


class _Quality(Chooser):
    def __init__(self, options: Options) -> None:
        self.options = options
        self.judged: dict[str, deque[tuple[np.ndarray, float]]] = {}

    def expected(self, vector: np.ndarray, replica: Replica) -> float:
        known = self.judged.get(replica.name, ())
        alike = ((float(vector @ one) ** SHARP, quality) for one, quality in known)
        near = heapq.nlargest(NEIGHBOURS, alike)
        weight = sum(alike for alike, _ in near)
        return (TRUST * PRIOR + sum(alike * quality for alike, quality in near)) / (TRUST + weight)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        vector = features(request.excerpt)
        found = [(replica, self.expected(vector, replica)) for replica in replicas]
        good = [
            (replica.price(request, replica.predict(request)), -quality, place)
            for place, (replica, quality) in enumerate(found)
            if quality >= self.options.enough
        ]
        best = replicas[min(good)[2]] if good else max(found, key=lambda one: one[1])[0]
        rest = (one for one in replicas if one is not best)
        return Choice((best, *rest), "cheapest_good" if good else "best")

    def learn(self, request: Request, replica: Replica, quality: float) -> None:
        known = self.judged.setdefault(replica.name, deque(maxlen=KEPT))
        known.append((features(request.excerpt), quality))


POLICY = Policy(
    "quality",
    "the cheapest backend whose answers to similar requests were judged good enough",
    lambda options, slo: _Quality(options),
    Options,
    alone=True,
)
