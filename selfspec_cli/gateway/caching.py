"""The answer cache on a request's way: a hit is replayed, equal requests at once share one call, an answer is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from selfspec_cli.gateway import replay
from selfspec_cli.gateway.cache import AnswerCache, key, specials
from selfspec_cli.gateway.client import Client
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Request
from selfspec_cli.gateway.settings import CacheSettings

LARGEST = 1 << 22  # bytes of an answer that is kept, and up to which an equal request may still join
AHEAD = 64  # parts of an answer that no client has taken yet, above which the backend is not read from

Ask = Callable[[Request, Outcome, Client], Awaitable[None]]


class Flight:
    """One call whose answer goes to all clients that ask the same. It goes on while one of them is there.

    messages: of ASGI, as they were sent. size: bytes of them. readers: clients. furthest: messages that one has taken.
    """

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.size = self.readers = self.furthest = 0
        self.client = Client(self.send, {})
        self.task: asyncio.Task[None] | None = None
        self.usage: dict[str, int] = {}
        self._news = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI: take a part of the answer; returns when the fastest client has room."""
        self.messages.append(message)
        self.size += len(message.get("body", b""))
        self._tell()
        while len(self.messages) - self.furthest > AHEAD:
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, client: Client) -> None:
        """Send the answer to a client, from its beginning; raises what the call raised."""
        assert self.task is not None
        self.task.add_done_callback(lambda task: self._tell())
        self.readers += 1
        try:
            place = 0
            while True:
                while place < len(self.messages):
                    message = self.messages[place]
                    place += 1
                    if place > self.furthest:
                        self.furthest = place
                        self._tell()
                    await client.hand_on(message)
                if self.task.done():
                    return self.task.result()
                await self._news.wait()
        finally:
            self.readers -= 1
            if not self.readers:
                self.task.cancel()


class Caching:
    """cache: None where none is configured. fault: called with what failed in the cache. flights: by key and form."""

    def __init__(
        self, settings: CacheSettings, cache: AnswerCache | None, fault: Callable[[BaseException], Any]
    ) -> None:
        self.settings, self.cache, self.fault = settings, cache, fault
        self.flights: dict[tuple[bytes, bool, bool], Flight] = {}
        self._files = ThreadPoolExecutor(1, "cache-file")

    async def call(self, method: Callable[..., Any], *values: Any) -> Any:
        """The result of a method of the cache, in the thread of its file."""
        return await asyncio.get_running_loop().run_in_executor(self._files, method, *values)

    def close(self) -> None:
        """Close the file."""
        if self.cache is not None:
            self._files.submit(self.cache.close).result()
        self._files.shutdown()

    def _wanted(self, request: Request) -> bool:
        """Whether a request may be answered from the cache. Who names a backend wants no other's answer."""
        elsewhere = request.backend is not None and request.cache is None
        fits = request.endpoint in (CHAT, COMPLETIONS) and specials(request) <= set(self.settings.also_for)
        return fits and not elsewhere and request.cache != "none"

    async def answered(self, request: Request, out: Outcome, client: Client, ask: Ask) -> bool:
        """Answer a request from the cache, or by a call that equal requests share; False where it is not cached.

        ask: has a backend answer a request. Raises GatewayError as it does.
        """
        if self.cache is None:
            return False
        if not self._wanted(request):
            out.cache = "bypassed"
            return False
        wanted, usage = key(request), bool((request.body.get("stream_options") or {}).get("include_usage"))
        now = time.time()
        try:
            hit = await self.call(self.cache.lookup, wanted, now, now - self.settings.ttl_s)
        except Exception as error:  # a cache that is broken costs no request
            out.cache = "failed"
            self.fault(error)
            return False
        if hit is not None:
            await self._replay(hit[0], hit[1], request, out, client, usage)
            return True
        form = (wanted, request.stream, usage)
        flight = self.flights.get(form)
        if flight is None or flight.size > LARGEST or not flight.readers:  # without readers it is being ended
            out.cache = "miss"
            flight = self.flights[form] = Flight()
            flight.task = asyncio.ensure_future(self._fly(flight, form, request, out, ask))
            await flight.follow(client)
        else:
            await self._share(flight, request, out, client)
        return True

    async def _replay(
        self, entry: str, kept: dict[str, Any], request: Request, out: Outcome, client: Client, usage: bool
    ) -> None:
        out.cache, out.route, out.reason = "hit", "cache", "exact"
        client.headers["x-selfspec-cache"] = f"hit; entry={entry}"
        answer = replay.renewed(kept)
        out.usage(answer.get("usage"))
        if not request.stream:
            return await client.whole(200, replay.dumps(answer))
        out.ttft = time.monotonic() - request.began
        await client.part(b"".join(replay.stream(answer, usage)), more=False)

    async def _share(self, flight: Flight, request: Request, out: Outcome, client: Client) -> None:
        """Follow a call that an equal request began."""
        out.cache, out.reason = "shared", "shared"
        client.headers["x-selfspec-cache"] = "shared"
        await flight.follow(client)
        out.route = "cache"
        out.usage(flight.usage)

    async def _fly(
        self, flight: Flight, form: tuple[bytes, bool, bool], request: Request, out: Outcome, ask: Ask
    ) -> None:
        try:
            await ask(request, out, flight.client)
        finally:
            if self.flights.get(form) is flight:
                del self.flights[form]
        raw = b"".join(message.get("body", b"") for message in flight.messages)
        prompt, tokens = out.prompt_tokens, out.tokens
        if prompt is not None and tokens is not None:
            flight.usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        answer = replay.document(raw) if flight.size <= LARGEST else None
        if answer is None or self.cache is None:
            return
        if not answer.get("usage") and flight.usage:
            answer["usage"] = flight.usage
        now = time.time()
        most = int(self.settings.mib * 2**20)
        try:
            await self.call(self.cache.store, form[0], request.tenant, answer, now, most, now - self.settings.ttl_s)
        except Exception as error:
            self.fault(error)
