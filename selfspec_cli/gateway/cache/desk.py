"""What the cache does in the thread of its file: find, keep, compare, learn, forget."""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from selfspec_cli.gateway.cache import replay
from selfspec_cli.gateway.cache.evidence import compare
from selfspec_cli.gateway.cache.guards import difference
from selfspec_cli.gateway.cache.judgement import Judgement, Verdict
from selfspec_cli.gateway.cache.promise import Promise
from selfspec_cli.gateway.cache.request import CacheRequest
from selfspec_cli.gateway.cache.storage import Entry, Storage
from selfspec_cli.gateway.cache.vectors import Vectors
from selfspec_cli.gateway.settings import CacheOptions

REMEMBERED = 4096  # misses whose answers are awaited, comparisons that wait, and hits that may be judged


@dataclass(frozen=True)
class Hit:
    """An answer out of the cache.

    Attributes:
        entry_id: what feedback and eviction name it by.
        kind: how it was found.
        answer: the document in OpenAI's form.
        chance_wrong: by the model, for a hit by meaning.
    """

    entry_id: str
    kind: Literal["exact", "meaning"]
    answer: dict[str, Any]
    chance_wrong: float | None = None


@dataclass(frozen=True)
class Candidate:
    """An entry that no guard objects to, for one question."""

    entry: int
    chance_wrong: float
    features: np.ndarray
    vector: np.ndarray
    words: frozenset[str]
    acceptable: bool

    def verdict(self, right: bool) -> Verdict:
        return Verdict(self.entry, self.features, self.vector, self.words, right)


@dataclass(frozen=True)
class Miss:
    """A question by meaning that was sent on: its vector, and the entry that its fresh answer will be compared with."""

    vector: np.ndarray
    candidate: Candidate | None


@dataclass(frozen=True)
class Waiting:
    """Waits for a judge: the fresh answer of a miss, as an entry of its own, against its candidate's answer."""

    tenant: str
    scope: bytes
    question: str
    miss: Miss
    fresh: int
    fresh_text: str


class Desk:
    """The file, the indices and what was learnt, all of one thread.

    Attributes:
        judged_later: whether a judge compares answers in idle time; otherwise their texts are compared at once.
        waiting: comparisons for that judge.
        counts: of what happened since the start.
    """

    def __init__(self, path: Path, options: CacheOptions, judged_later: bool) -> None:
        self._options, self.judged_later = options, judged_later
        self.storage = Storage(path)
        self.vectors = Vectors(self.storage.vectors())
        self.judgements: dict[str, Judgement] = {}
        self.waiting: deque[Waiting] = deque()
        self.counts: Counter[str] = Counter()
        self._misses: OrderedDict[bytes, Miss] = OrderedDict()
        self._served: OrderedDict[int, Candidate] = OrderedDict()
        self._coin = random.Random(options.seed) if options.seed is not None else random.SystemRandom()

    def no_answer(self, key: bytes) -> None:
        """A miss got no answer that may be kept."""
        self.counts["not kept"] += 1
        self._misses.pop(key, None)

    def _judgement(self, tenant: str) -> Judgement:
        if tenant not in self.judgements:
            promise = self.storage.promise(tenant)
            if promise is None or (promise.delta, promise.alpha) != (self._options.delta, self._options.alpha):
                promise = Promise(self._options.delta, self._options.alpha)  # another promise has to be earned anew
            self.judgements[tenant] = Judgement(promise, self.storage.verdicts(tenant))
        return self.judgements[tenant]

    def exact(self, key: bytes, now: float) -> Hit | None:
        found = self.storage.by_key(key, now)
        if found is None:
            return None
        self.storage.used(found[0], now)
        self._served.pop(found[0], None)
        return Hit(_name(found[0]), "exact", orjson.loads(found[1]))

    def by_meaning(self, request: CacheRequest, question: str, vector: np.ndarray, now: float) -> Hit | None:
        judgement = self._judgement(request.tenant)
        best = self._best(judgement, request.scope, question, vector, now)
        audited = self._coin.random() < self._options.audit
        if best is not None and best.acceptable and judgement.promise.open and not audited:
            answer = self.storage.answer(best.entry)
            if answer is not None:
                self.storage.used(best.entry, now)
                _remember(self._served, best.entry, best)
                return Hit(_name(best.entry), "meaning", orjson.loads(answer), best.chance_wrong)
        _remember(self._misses, request.key, Miss(vector, best))
        return None

    def _best(
        self, judgement: Judgement, scope: bytes, question: str, vector: np.ndarray, now: float
    ) -> Candidate | None:
        """Of the nearest entries that no guard objects to, the one that is likeliest right."""
        near = self.vectors.nearest(scope, vector)
        questions = self.storage.questions([entry for entry, _ in near], now)
        nearness = judgement.nearness(vector)
        best: Candidate | None = None
        for entry, cosine in near:
            cached = questions.get(entry)
            if cached is None:
                continue
            if (guard := difference(question, cached)) is not None:
                self.counts[f"guarded by {guard}"] += 1
                continue
            texts = compare(question, cached)
            chance, features = judgement.chance(entry, cosine, texts, nearness)
            if best is None or chance < best.chance_wrong:
                best = Candidate(entry, chance, features, vector, texts.words, judgement.acceptable(chance))
        return best

    def keep(self, request: CacheRequest, answer: dict[str, Any]) -> str:
        now = time.time() if request.now is None else request.now
        miss = self._misses.pop(request.key, None)
        if miss is None and (known := self.storage.by_key(request.key, now)) is not None:
            return _name(known[0])  # the same request, asked at the same time, was answered first
        number = secrets.randbits(62) + 1
        new = miss is not None and miss.candidate is None  # nothing like it: it may be found by meaning at once
        question = request.question if miss is not None else None
        vector = miss.vector if new and miss is not None else None
        times = (now, now, now + self._options.ttl_s)
        entry = Entry(
            number, request.key, request.tenant, request.scope, question, orjson.dumps(answer), vector, *times
        )
        replaced = self.storage.put(entry)
        if replaced is not None:
            self._forget(replaced, request.scope)
        if vector is not None:
            self.vectors.add(request.scope, number, vector)
        elif miss is not None and question is not None:
            text = replay.text_of(answer)
            self._compare(Waiting(request.tenant, request.scope, question, miss, number, text))
        for old, scope in self.storage.surplus(now, self._options.entries, int(self._options.mib * 2**20)):
            self.storage.remove(old)
            self._forget(old, scope)
            self.counts["evicted"] += 1
        return _name(number)

    def _compare(self, waiting: Waiting) -> None:
        if self.judged_later:
            if len(self.waiting) < REMEMBERED:
                self.waiting.append(waiting)
            return
        assert waiting.miss.candidate is not None
        cached = self.storage.answer(waiting.miss.candidate.entry)
        if cached is not None:
            self.judged(waiting, replay.text_of(orjson.loads(cached)).split() == waiting.fresh_text.split())

    def judged(self, waiting: Waiting, right: bool | None) -> None:
        """Learn from a comparison; a fresh answer that differs may be found by meaning from now on."""
        if right is None:
            self.counts["verdicts missing"] += 1
            return
        candidate = waiting.miss.candidate
        assert candidate is not None
        judgement = self._judgement(waiting.tenant)
        if candidate.acceptable:
            judgement.promise = judgement.promise.after(right)
        self._learn(waiting.tenant, candidate.verdict(right))
        if not right and self.storage.find_by_meaning(waiting.fresh, waiting.miss.vector):
            self.vectors.add(waiting.scope, waiting.fresh, waiting.miss.vector)

    def _learn(self, tenant: str, verdict: Verdict) -> None:
        judgement = self._judgement(tenant)
        judgement.learn(verdict)
        self.storage.add_verdict(tenant, verdict, judgement.promise)
        self.counts["verdicts right" if verdict.right else "verdicts wrong"] += 1

    def feedback(self, entry: int, right: bool) -> bool:
        place = self.storage.place(entry)
        if place is None:
            return False
        candidate = self._served.pop(entry, None)
        if candidate is None:
            if not right:
                self.evict(entry)
            return True
        judgement = self._judgement(place[0])
        if not right:
            judgement.promise = judgement.promise.after_complaint()
        self._learn(place[0], candidate.verdict(right))
        return True

    def evict(self, entry: int) -> bool:
        place = self.storage.place(entry)
        if place is None:
            return False
        self.storage.remove(entry)
        self._forget(entry, place[1])
        return True

    def _forget(self, entry: int, scope: bytes) -> None:
        self.vectors.remove(scope, entry)
        self._served.pop(entry, None)


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > REMEMBERED:
        table.popitem(last=False)


def _name(entry: int) -> str:
    return f"{entry:016x}"
