"""The answer cache on a request's way: whether it may be asked, the replay of a hit, and what is kept."""

from __future__ import annotations

from typing import Any

from selfspec_cli.gateway.asked import CHAT, EMBEDDINGS, Asked
from selfspec_cli.gateway.client import EVENTS, JSON, Client
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.ports import AnswerCache
from selfspec_cli.gateway.settings import CacheSettings

LARGEST = 1 << 20  # bytes of an answer that is kept
_NOT_SAMPLING = ("model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store", "tools",
                 "priority", "request_id")  # fmt: skip


class Caching:
    """cache: None where no cache is configured."""

    def __init__(self, settings: CacheSettings, cache: AnswerCache | None) -> None:
        self.settings, self.cache = settings, cache

    def _wants(self, asked: Asked) -> str:
        """What a request may be answered by: never more than the settings allow, nor than the client wishes."""
        order = ("none", "exact", "meaning")
        allowed = order.index(self.settings.kind if self.cache is not None else "none")
        wished = order.index(asked.cache) if asked.cache is not None else allowed
        return "none" if asked.endpoint == EMBEDDINGS else order[min(allowed, wished)]

    def _request(self, asked: Asked) -> Any:
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
        hit = await self.cache.lookup(self._request(asked))
        if hit is None:
            out.cache = "miss"
            return False
        out.cache, out.route, out.reason = "hit", "cache", str(hit.kind)
        client.headers["x-selfspec-cache"] = f"hit; entry={hit.entry_id}"
        kind = EVENTS if asked.stream else JSON
        await client.begin(200, kind)
        async for part in self.cache.replay(hit, asked.stream):
            await client.part(part)
        await client.end()
        return True

    def keep(self, asked: Asked, out: Outcome, client: Client) -> None:
        """Let the client's side keep what it sends, where it may be stored."""
        if out.cache == "miss":
            client.keep(LARGEST)

    async def store(self, asked: Asked, out: Outcome, client: Client) -> None:
        """Keep an answer that was a miss, came whole, and is not too long."""
        if self.cache is None or out.cache != "miss" or not client.kept:
            return
        usage = {"prompt_tokens": out.prompt_tokens, "completion_tokens": out.tokens}
        await self.cache.store(self._request(asked), client.kept, {"stream": asked.stream, "usage": usage})
