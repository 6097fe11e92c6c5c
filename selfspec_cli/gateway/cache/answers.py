"""The cache that the gateway asks: the same request first, then one that means the same, if allowed and proven."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from selfspec_cli.gateway.cache import replay
from selfspec_cli.gateway.cache.embedding import MiniLM
from selfspec_cli.gateway.cache.evidence import compare
from selfspec_cli.gateway.cache.guards import difference
from selfspec_cli.gateway.cache.judgement import Judgement, Verdict
from selfspec_cli.gateway.cache.options import CacheOptions, options_from
from selfspec_cli.gateway.cache.promise import Promise
from selfspec_cli.gateway.cache.request import CacheRequest
from selfspec_cli.gateway.cache.storage import Entry, Storage
from selfspec_cli.gateway.cache.vectors import Vectors

Judge = Callable[[str, str, str], Awaitable[bool | None]]
"""(question, cached answer, fresh answer) -> whether the cached answer is as right as the fresh one; None: could not be
asked, for a reason that has nothing to do with the answers."""
Embed = Callable[[list[str]], list[np.ndarray | None]]

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


class AnswerCache:
    """See `open_cache`. Every method may be called from one event loop; the file and the indices live in one thread of
    their own, the encoder in another.
    """

    def __init__(
        self, path: Path, options: CacheOptions, judge: Judge | None = None, embed: Embed | None = None
    ) -> None:
        """
        Args:
            path: the SQLite file, made if there is none.
            judge: compares answers, in `settle`. Without one, answers are compared as they come, and are the same only
                if
                their texts are: a strict judge, with which few hits by meaning are ever found.
            embed: texts -> unit vectors; None: all-MiniLM-L6-v2, loaded at the first question.
        """
        self.options, self._judge, self._embed = options, judge, embed or MiniLM()
        self._storage = Storage(path)
        self._vectors = Vectors(self._storage.vectors())
        self._judgements: dict[str, Judgement] = {}
        self._misses: OrderedDict[bytes, Miss] = OrderedDict()
        self._served: OrderedDict[int, Candidate] = OrderedDict()
        self._waiting: deque[Waiting] = deque()
        self._coin = random.Random(options.seed) if options.seed is not None else random.SystemRandom()
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._files = ThreadPoolExecutor(1, "cache-file")
        self._encoder = ThreadPoolExecutor(1, "cache-encoder")

    async def lookup(self, request: CacheRequest) -> Hit | None:
        """The answer to this request, or to one that means the same; None where there is none or none may be given."""
        if not self._cached(request):
            self._counts["bypassed"] += 1
            return None
        loop = asyncio.get_running_loop()
        now = time.time() if request.now is None else request.now
        hit = await loop.run_in_executor(self._files, self._exact, request.key, now)
        question = request.question if request.wants == "meaning" else None
        if hit is None and question is not None:
            vector = (await loop.run_in_executor(self._encoder, self._embed, [question]))[0]
            if vector is not None:
                hit = await loop.run_in_executor(self._files, self._by_meaning, request, question, vector, now)
        self._counts["misses" if hit is None else f"{hit.kind} hits"] += 1
        return hit

    async def store(self, request: CacheRequest, answer_chunks: list[bytes], final: Mapping[str, Any]) -> str | None:
        """Keep a fresh answer, after `lookup` had none.

        Args:
            answer_chunks: the bytes that the client was sent, of a stream or in one piece.
            final: what the answer is known to be beside that; its `usage` is kept where the chunks have none.

        Returns:
            The entry's id; None for an answer that is not kept: an error, one cut off, or a request that is not cached.
        """
        if not self._cached(request):
            return None
        try:
            answer = replay.document(answer_chunks)
        except replay.Incomplete:
            self._counts["not kept"] += 1
            self._misses.pop(request.key, None)
            return None
        if not answer.get("usage") and final.get("usage"):
            answer["usage"] = dict(final["usage"])
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._files, self._keep, request, answer)

    async def settle(self, most: int = 1) -> int:
        """Let the judge compare up to `most` answers that wait for it, when the backend idles. Returns how many."""
        done = 0
        while self._judge is not None and self._waiting and done < most:
            waiting = self._waiting.popleft()
            candidate = waiting.miss.candidate
            assert candidate is not None
            loop = asyncio.get_running_loop()
            cached = await loop.run_in_executor(self._files, self._storage.answer, candidate.entry)
            if cached is None:
                continue
            right = await self._judge(waiting.question, replay.text_of(orjson.loads(cached)), waiting.fresh_text)
            await loop.run_in_executor(self._files, self._judged, waiting, right)
            done += 1
        return done

    async def replay(self, hit: Hit, stream: bool, include_usage: bool = False) -> AsyncIterator[bytes]:
        """A hit's bytes: a stream of events up to [DONE], with the usage if it was asked for, or one document."""
        answer = replay.renewed(hit.answer)
        if not stream:
            yield orjson.dumps(answer)
            return
        for event in replay.stream(answer, include_usage):
            yield event

    def feedback(self, entry_id: str, right: bool) -> None:
        """A client judged a hit. A wrong answer to the same request is evicted; one by meaning raises the entry's
        threshold and counts against the promise. Praise moves the entry's threshold alone.
        """
        self._files.submit(self._feedback, _number(entry_id), right).result()

    def evict(self, entry_id: str) -> bool:
        """Forget one answer; whether there was one."""
        return self._files.submit(self._evict, _number(entry_id)).result()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, the size, and of each tenant that was seen the state of its promise."""
        tenants = {
            tenant: {
                "open": judgement.promise.open,
                "audits": judgement.promise.audits,
                "wrong_audits": judgement.promise.wrong_audits,
                "wager": float(np.exp(judgement.promise.log_e)),
                "opens_at": 1 / judgement.promise.alpha,
            }
            for tenant, judgement in list(self._judgements.items())
        }
        size = {"entries": self._storage.entries, "bytes": self._storage.bytes, "vectors": len(self._vectors)}
        return {
            **self._counts,
            **size,
            "waiting_verdicts": len(self._waiting),
            "delta": self.options.delta,
            "tenants": tenants,
        }

    def close(self) -> None:
        """End both threads and close the file; comparisons that wait are given up. A second time it does nothing."""
        if self._closed:
            return
        self._closed = True
        self._encoder.shutdown(cancel_futures=True)
        self._files.submit(self._storage.close).result()
        self._files.shutdown()

    def _cached(self, request: CacheRequest) -> bool:
        return request.wants != "none" and request.specials <= set(self.options.also_for)

    # What follows runs in the file's thread.

    def _judgement(self, tenant: str) -> Judgement:
        if tenant not in self._judgements:
            promise = self._storage.promise(tenant)
            if promise is None or (promise.delta, promise.alpha) != (self.options.delta, self.options.alpha):
                promise = Promise(self.options.delta, self.options.alpha)  # another promise has to be earned anew
            self._judgements[tenant] = Judgement(promise, self._storage.verdicts(tenant))
        return self._judgements[tenant]

    def _exact(self, key: bytes, now: float) -> Hit | None:
        found = self._storage.by_key(key, now)
        if found is None:
            return None
        self._storage.used(found[0], now)
        self._served.pop(found[0], None)
        return Hit(_name(found[0]), "exact", orjson.loads(found[1]))

    def _by_meaning(self, request: CacheRequest, question: str, vector: np.ndarray, now: float) -> Hit | None:
        judgement = self._judgement(request.tenant)
        best = self._best(judgement, request.scope, question, vector, now)
        audited = self._coin.random() < self.options.audit
        if best is not None and best.acceptable and judgement.promise.open and not audited:
            answer = self._storage.answer(best.entry)
            if answer is not None:
                self._storage.used(best.entry, now)
                _remember(self._served, best.entry, best)
                return Hit(_name(best.entry), "meaning", orjson.loads(answer), best.chance_wrong)
        _remember(self._misses, request.key, Miss(vector, best))
        return None

    def _best(
        self, judgement: Judgement, scope: bytes, question: str, vector: np.ndarray, now: float
    ) -> Candidate | None:
        """Of the nearest entries that no guard objects to, the one that is likeliest right."""
        near = self._vectors.nearest(scope, vector)
        questions = self._storage.questions([entry for entry, _ in near], now)
        nearness = judgement.nearness(vector)
        best: Candidate | None = None
        for entry, cosine in near:
            cached = questions.get(entry)
            if cached is None:
                continue
            if (guard := difference(question, cached)) is not None:
                self._counts[f"guarded by {guard}"] += 1
                continue
            texts = compare(question, cached)
            chance, features = judgement.chance(entry, cosine, texts, nearness)
            if best is None or chance < best.chance_wrong:
                best = Candidate(entry, chance, features, vector, texts.words, judgement.acceptable(chance))
        return best

    def _keep(self, request: CacheRequest, answer: dict[str, Any]) -> str:
        now = time.time() if request.now is None else request.now
        miss = self._misses.pop(request.key, None)
        number = secrets.randbits(62) + 1
        new = miss is not None and miss.candidate is None  # nothing like it: it may be found by meaning at once
        question = request.question if miss is not None else None
        vector = miss.vector if new and miss is not None else None
        times = (now, now, now + self.options.ttl_s)
        entry = Entry(
            number, request.key, request.tenant, request.scope, question, orjson.dumps(answer), vector, *times
        )
        replaced = self._storage.put(entry)
        if replaced is not None:
            self._forget(replaced, request.scope)
        if vector is not None:
            self._vectors.add(request.scope, number, vector)
        elif miss is not None and question is not None:
            text = replay.text_of(answer)
            self._compare(Waiting(request.tenant, request.scope, question, miss, number, text))
        for old, scope in self._storage.surplus(now, self.options.entries, int(self.options.mib * 2**20)):
            self._storage.remove(old)
            self._forget(old, scope)
            self._counts["evicted"] += 1
        return _name(number)

    def _compare(self, waiting: Waiting) -> None:
        if self._judge is not None:
            if len(self._waiting) < REMEMBERED:
                self._waiting.append(waiting)
            return
        assert waiting.miss.candidate is not None
        cached = self._storage.answer(waiting.miss.candidate.entry)
        if cached is not None:
            self._judged(waiting, replay.text_of(orjson.loads(cached)).split() == waiting.fresh_text.split())

    def _judged(self, waiting: Waiting, right: bool | None) -> None:
        """Learn from a comparison; a fresh answer that differs may be found by meaning from now on."""
        if right is None:
            self._counts["verdicts missing"] += 1
            return
        candidate = waiting.miss.candidate
        assert candidate is not None
        judgement = self._judgement(waiting.tenant)
        if candidate.acceptable:
            judgement.promise = judgement.promise.after(right)
        self._learn(waiting.tenant, candidate.verdict(right))
        if not right and self._storage.find_by_meaning(waiting.fresh, waiting.miss.vector):
            self._vectors.add(waiting.scope, waiting.fresh, waiting.miss.vector)

    def _learn(self, tenant: str, verdict: Verdict) -> None:
        judgement = self._judgement(tenant)
        judgement.learn(verdict)
        self._storage.add_verdict(tenant, verdict, judgement.promise)
        self._counts["verdicts right" if verdict.right else "verdicts wrong"] += 1

    def _feedback(self, entry: int, right: bool) -> None:
        place = self._storage.place(entry)
        if place is None:
            return
        candidate = self._served.pop(entry, None)
        if candidate is None:
            if not right:
                self._evict(entry)
            return
        judgement = self._judgement(place[0])
        if not right:
            judgement.promise = judgement.promise.after_complaint()
        self._learn(place[0], candidate.verdict(right))

    def _evict(self, entry: int) -> bool:
        place = self._storage.place(entry)
        if place is None:
            return False
        self._storage.remove(entry)
        self._forget(entry, place[1])
        return True

    def _forget(self, entry: int, scope: bytes) -> None:
        self._vectors.remove(scope, entry)
        self._served.pop(entry, None)


def open_cache(path: str | Path, options: Mapping[str, Any] | None = None, judge: Judge | None = None) -> AnswerCache:
    """The cache in a file.

    Raises:
        SettingsError: an option that there is not, a value out of range, or a file that is in use or no cache's.
    """
    return AnswerCache(Path(path), options_from(options or {}), judge)


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > REMEMBERED:
        table.popitem(last=False)


def _name(entry: int) -> str:
    return f"{entry:016x}"


def _number(entry_id: str) -> int:
    """The number of an entry's id; 0, which no entry has, for what is no id."""
    try:
        return int(entry_id, 16)
    except ValueError:
        return 0
