"""The cache that the gateway asks: the same request first, then one that means the same, if allowed and proven."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from selfspec_cli.gateway.cache import replay
from selfspec_cli.gateway.cache.desk import Desk, Hit
from selfspec_cli.gateway.cache.embedding import MiniLM
from selfspec_cli.gateway.cache.request import CacheRequest
from selfspec_cli.gateway.settings import CacheOptions

Judge = Callable[[str, str, str], Awaitable[bool | None]]
"""(question, cached answer, fresh answer) -> whether the cached answer is as right as the fresh one; None: could not be
asked, for a reason that has nothing to do with the answers."""
Embed = Callable[[list[str]], list[np.ndarray | None]]


class AnswerCache:
    """The cache in a file. Every method may be called from one event loop; the file and the indices live in one thread
    of their own, the encoder in another.
    """

    def __init__(
        self, path: Path, options: CacheOptions, judge: Judge | None = None, embed: Embed | None = None
    ) -> None:
        """
        Args:
            path: the SQLite file, made if there is none.
            judge: compares answers, in `settle`. Without one, answers are compared as they come, and are the same only
                if their texts are: a strict judge, with which few hits by meaning are ever found.
            embed: texts -> unit vectors; None: all-MiniLM-L6-v2, loaded at the first question.

        Raises:
            SettingsError: the file is in use, or is no cache's.
        """
        self.options, self._judge, self._embed = options, judge, embed or MiniLM()
        self._desk = Desk(path, options, judge is not None)
        self._closed = False
        self._files = ThreadPoolExecutor(1, "cache-file")
        self._encoder = ThreadPoolExecutor(1, "cache-encoder")

    async def lookup(self, request: CacheRequest) -> Hit | None:
        """The answer to this request, or to one that means the same; None where there is none or none may be given."""
        if not self._cached(request):
            self._desk.counts["bypassed"] += 1
            return None
        loop = asyncio.get_running_loop()
        now = time.time() if request.now is None else request.now
        hit = await loop.run_in_executor(self._files, self._desk.exact, request.key, now)
        question = request.question if request.wants == "meaning" else None
        if hit is None and question is not None:
            vector = (await loop.run_in_executor(self._encoder, self._embed, [question]))[0]
            if vector is not None:
                hit = await loop.run_in_executor(self._files, self._desk.by_meaning, request, question, vector, now)
        self._desk.counts["misses" if hit is None else f"{hit.kind} hits"] += 1
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
            await asyncio.get_running_loop().run_in_executor(self._files, self._desk.no_answer, request.key)
            return None
        if not answer.get("usage") and final.get("usage"):
            answer["usage"] = dict(final["usage"])
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._files, self._desk.keep, request, answer)

    async def settle(self, most: int = 1) -> int:
        """Let the judge compare up to `most` answers that wait for it, when the backend idles. Returns how many."""
        done = 0
        while self._judge is not None and self._desk.waiting and done < most:
            waiting = self._desk.waiting.popleft()
            candidate = waiting.miss.candidate
            assert candidate is not None
            loop = asyncio.get_running_loop()
            cached = await loop.run_in_executor(self._files, self._desk.storage.answer, candidate.entry)
            if cached is None:
                continue
            right = await self._judge(waiting.question, replay.text_of(orjson.loads(cached)), waiting.fresh_text)
            await loop.run_in_executor(self._files, self._desk.judged, waiting, right)
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

    def feedback(self, entry_id: str, right: bool) -> bool:
        """A client judged a hit; whether there is such an entry. A wrong answer to the same request is evicted; one by
        meaning raises the entry's threshold and counts against the promise. Praise moves the entry's threshold alone.
        """
        return self._files.submit(self._desk.feedback, _number(entry_id), right).result()

    def evict(self, entry_id: str) -> bool:
        """Forget one answer; whether there was one."""
        return self._files.submit(self._desk.evict, _number(entry_id)).result()

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
            for tenant, judgement in list(self._desk.judgements.items())
        }
        size = {
            "entries": self._desk.storage.entries,
            "bytes": self._desk.storage.bytes,
            "vectors": len(self._desk.vectors),
        }
        return {
            **self._desk.counts,
            **size,
            "waiting_verdicts": len(self._desk.waiting),
            "delta": self.options.delta,
            "tenants": tenants,
        }

    def close(self) -> None:
        """End both threads and close the file; comparisons that wait are given up. A second time it does nothing."""
        if self._closed:
            return
        self._closed = True
        self._encoder.shutdown(cancel_futures=True)
        self._files.submit(self._desk.storage.close).result()
        self._files.shutdown()

    def _cached(self, request: CacheRequest) -> bool:
        return request.wants != "none" and request.specials <= set(self.options.also_for)


def _number(entry_id: str) -> int:
    """The number of an entry's id; 0, which no entry has, for what is no id."""
    try:
        number = int(entry_id, 16)
    except ValueError:
        return 0
    return number if 0 < number < 1 << 63 else 0
