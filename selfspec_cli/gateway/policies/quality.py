"""The cheapest backend whose answers to similar requests were good enough.

A request is a vector of its hashed character trigrams. The quality that a backend is expected to have is the mean of
what was judged (by clients, at /gateway/feedback) of the NEIGHBOURS most similar requests that it answered, weighted
by similarity, with TRUST judgements of the value PRIOR mixed in. Of the backends that reach `enough` the cheapest
is chosen; where none does, the best.

It loses to round robin where nobody judges answers: it then knows prices alone.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.gateway.policies.base import Choice, Chooser, Policy
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request

SIZE = 256
KEPT = 2000  # judgements of each backend
SHARP = 4  # power of a similarity: texts that have only their language in common have about a half
NEIGHBOURS = 10  # most similar requests whose judgements count
PRIOR, TRUST = 0.8, 1.0  # quality where nothing is known, and how many judgements that weighs as much as
LONGEST = 2000  # characters of a request that are looked at, half of them at each end

Vector = dict[int, float]


def features(text: str) -> Vector:
    """Hashed character trigrams of a text, of length 1; sparse."""
    if len(text) > LONGEST:
        text = text[: LONGEST // 2] + text[-LONGEST // 2 :]
    text = f" {text.lower()} "
    counts: Vector = {}
    for place in range(len(text) - 2):
        place_of = zlib.crc32(text[place : place + 3].encode()) % SIZE
        counts[place_of] = counts.get(place_of, 0.0) + 1.0
    length = sum(count * count for count in counts.values()) ** 0.5 or 1.0
    return {key: count / length for key, count in counts.items()}


@dataclass(frozen=True)
class Options:
    enough: float = knob(0.7, help="quality of which the cheapest backend is taken", unit="fraction", low=0, high=1)


class _Quality(Chooser):
    def __init__(self, options: Options) -> None:
        self.options = options
        self.judged: dict[str, deque[tuple[Vector, float]]] = {}

    def expected(self, vector: Vector, replica: Replica) -> float:
        """The quality, 0 to 1, of this backend's answer."""
        known = self.judged.get(replica.name, ())
        cosines = [(sum(part * one.get(key, 0.0) for key, part in vector.items()), quality) for one, quality in known]
        near = sorted(((cosine**SHARP, quality) for cosine, quality in cosines), reverse=True)[:NEIGHBOURS]
        weight = sum(alike for alike, _ in near)
        return (TRUST * PRIOR + sum(alike * quality for alike, quality in near)) / (TRUST + weight)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        vector = features(request.text)
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
        known.append((features(request.text), quality))


POLICY = Policy(
    "quality",
    "the cheapest backend whose answers to similar requests were judged good enough",
    lambda options, slo: _Quality(options),
    Options,
    alone=True,
)
