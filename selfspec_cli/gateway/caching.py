"""The answer cache on a request's way: whether it may be asked, the replay of a hit, and what is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from selfspec_cli.gateway.asked import CHAT, EMBEDDINGS, Asked
from selfspec_cli.gateway.client import EVENTS, JSON, Client
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.settings import CacheSettings

if TYPE_CHECKING:
    from selfspec_cli.gateway.cache import AnswerCache, CacheRequest

LARGEST = 1 << 20  # bytes of an answer that is kept
_NOT_SAMPLING = ("model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store", "tools",
                 "priority", "request_id")  # fmt: skip


class Caching:
    """cache: None where no cache is configured. fault: called with what failed in the cache."""

    def __init__(
        self, settings: CacheSettings, cache: AnswerCache | None, fault: Callable[[BaseException], None]
    ) -> None:
        self.settings, self.cache, self.fault = settings, cache, fault
        self._settling: asyncio.Task[None] | None = None

    def _wants(self, asked: Asked) -> Literal["none", "exact", "meaning"]:
        """What a request may be answered by: never more than the settings allow, nor than the client wishes. Who names
        a backend wants no other's answer."""
        order: tuple[Literal["none", "exact", "meaning"], ...] = ("none", "exact", "meaning")
        allowed = order.index(self.settings.kind if self.cache is not None else "none")
        wished = order.index(asked.cache) if asked.cache is not None else allowed
        elsewhere = asked.backend is not None and asked.cache is None
        return "none" if asked.endpoint == EMBEDDINGS or elsewhere else order[min(allowed, wished)]

    def _request(self, asked: Asked) -> CacheRequest:
        from selfspec_cli.gateway.cache import CacheRequest

        body = asked.body
        messages = body.get("messages") if asked.endpoint == CHAT else None
        return CacheRequest(
            tenant=asked.tenant,
            model=asked.model,
            endpoint=asked.endpoint,
            messages=messages,
            prompt=body.get("prompt"),
            sampling={name: value for name, value in body.items() if name not in _NOT_SAMPLING},
            tools=body.get("tools"),
            wants=self._wants(asked),
        )

    async def answered(self, asked: Asked, out: Outcome, client: Client) -> bool:
        """Answer a request from the cache, if it may be and can be; says so in `out`."""
        if self.cache is None:
            return False
        if self._wants(asked) == "none":
            out.cache = "bypassed"
            return False
        try:
            hit = await self.cache.lookup(self._request(asked))
        except Exception as error:  # a cache that is broken costs no request
            out.cache = "failed"
            self.fault(error)
            return False
        if hit is None:
            out.cache = "miss"
            return False
        out.cache, out.route, out.reason = "hit", "cache", str(hit.kind)
        client.headers["x-selfspec-cache"] = f"hit; entry={hit.entry_id}"
        usage = bool((asked.body.get("stream_options") or {}).get("include_usage"))
        await client.begin(200, EVENTS if asked.stream else JSON)
        async for part in self.cache.replay(hit, asked.stream, usage):
            if out.ttft is None and asked.stream:
                out.ttft = time.monotonic() - asked.began
            await client.part(part)
        await client.end()
        out.usage(hit.answer.get("usage"))
        return True

    def keep(self, out: Outcome, client: Client) -> None:
        """Let the client's side keep what it sends, where it may be stored."""
        if out.cache == "miss":
            client.keep(LARGEST)

    async def store(self, asked: Asked, out: Outcome, client: Client) -> None:
        """Keep an answer that was a miss, came whole, and is not too long."""
        if self.cache is None or out.cache != "miss" or not client.kept:
            return
        usage = {"prompt_tokens": out.prompt_tokens, "completion_tokens": out.tokens}
        try:
            await self.cache.store(self._request(asked), client.kept, {"usage": usage})
        except Exception as error:
            self.fault(error)

    def settle(self) -> None:
        """Let answers be judged, one at a time; called when the backend that judges idles."""
        if self.cache is not None and self._settling is None:
            self._settling = asyncio.ensure_future(self._settle(self.cache))

    async def _settle(self, cache: AnswerCache) -> None:
        try:
            await cache.settle(1)
        except Exception as error:
            self.fault(error)
        finally:
            self._settling = None
