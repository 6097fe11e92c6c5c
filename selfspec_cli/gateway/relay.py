"""One answer, from a backend to the client: other backends are tried before the first byte, and continue after it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from selfspec_cli.gateway import continuation, events
from selfspec_cli.gateway.asked import CHAT, EMBEDDINGS, Asked
from selfspec_cli.gateway.client import Client
from selfspec_cli.gateway.errors import GatewayError, of_backend
from selfspec_cli.gateway.events import END, BrokenStream, Frames, Kept
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.policies.cascade import sureness
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.upstream import BackendFailed, Refused, outgoing, prepared

if TYPE_CHECKING:
    from selfspec_cli.gateway.core import Gateway


DRAIN_SECONDS = 0.5  # for the end of an answer, behind its last event


@dataclass
class Relay:
    """What is known of an answer while it is sent. last: when the newest token came. ends: choices that have ended.
    counted: whether the tokens of what the backend of now does are known. tokens_before: those of other backends."""

    gateway: Gateway
    asked: Asked
    out: Outcome
    client: Client
    kept: Kept = field(default_factory=Kept)
    way: str = continuation.NOT
    first: float | None = None
    first_of_rest: float | None = None
    last: float | None = None
    ends: int = 0
    finished: bool = False
    counted: bool = False
    rest: continuation.Rest | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tokens_before: int = 0
    sure: float | None = None
    spare: tuple[Replica, bytes] | None = None

    async def run(self, order: Iterable[Replica]) -> None:
        """Answer the request by the first of these backends that can.

        Raises:
            GatewayError: nobody could; nothing has been sent to the client.
        """
        limits, failure = self.gateway.settings.limits, None
        tried = list(order)[: limits.attempts]
        for replica in tried:
            if replica is tried[-1]:
                self.sure = None  # nobody is left to ask: its answer is taken
            if replica is not tried[0]:
                self.out.expect(replica.predict(self.asked))
            try:
                await self._leg(replica)
                return
            except Refused as error:
                replica.succeeded()
                if self.spare is not None:
                    continue
                self.out.route, self.out.status = replica.name, error.status
                self.client.headers["x-selfspec-backend"] = replica.name
                return await self.client.whole(error.status, of_backend(error.status, error.raw, replica.name))
            except BackendFailed as error:
                failure = (replica, error)
                self._failed(replica, error)
                if self.client.begun:
                    return await self._continue(replica, error)
        if self.spare is not None:  # nobody else could answer: the answer of which its backend was not sure is one
            known, raw = self.spare
            self.out.route, self.finished = known.name, True
            self.client.headers["x-selfspec-backend"] = known.name
            return await self.client.whole(200, raw)
        assert failure is not None  # `order` is not empty: `Gateway._route` refuses a request that nobody takes
        last, fault = failure
        raise GatewayError(f"backend {last.name}: {fault}", fault.status, "backend_error", backend=last.name)

    def _failed(self, replica: Replica, error: BackendFailed) -> None:
        self.out.tried.append(replica.name)
        if error.counts:
            limits = self.gateway.settings.limits
            replica.failed(limits.failures, limits.open_seconds)

    async def _continue(self, dead: Replica, failure: BackendFailed) -> None:
        """Let others send the rest of a stream.

        Raises:
            GatewayError: nobody can; the caller sends the error inside the stream.
        """
        broken_at, last_seen = time.monotonic(), self.last
        reason = f"{failure}; it could not be continued"
        if not self.gateway.settings.survive or self.way == continuation.NOT:
            raise self._broken(dead, f"{reason}: a request of this kind is not")
        self.rest = continuation.Rest(self.asked, self.kept, self.way)
        for _ in range(self.gateway.settings.limits.attempts):
            others = [one for one in self.gateway.candidates(self.asked)
                      if one.weights == dead.weights and one.name != dead.name
                      and (one.vllm or self.way == continuation.AGAIN)]  # fmt: skip
            if not others:
                break
            new = [one for one in others if one.name not in self.out.tried]
            replica = self.gateway.choose(self.asked, new or others).order[0]
            try:
                self.tokens_before = len(self.kept.token_ids())
                await self._leg(replica)
                self.out.survived += 1
                self.gateway.telemetry.survived.labels(replica.name).inc()
                since = last_seen if last_seen is not None else broken_at
                self.out.lost = (self.first_of_rest or time.monotonic()) - since
                return
            except Refused as error:
                reason = f"{replica.name} refused the continuation: {error.raw[:200].decode(errors='replace')}"
                break
            except BackendFailed as error:
                self._failed(replica, error)
                dead, reason = replica, str(error)
        raise self._broken(dead, reason)

    def _broken(self, dead: Replica, reason: str) -> GatewayError:
        self.gateway.telemetry.broken.labels(dead.name).inc()
        return GatewayError(f"backend {dead.name} broke off: {reason}", 502, "backend_error", backend=dead.name)

    async def _leg(self, replica: Replica) -> None:
        """What one backend sends of the answer.

        Raises:
            BackendFailed: it sent nothing, or broke off. Refused: the request itself is wrong.
        """
        path, body = self.asked.endpoint, self.asked.body
        if self.rest is not None:
            try:
                wanted = self.rest.request()
            except BrokenStream as error:
                raise BackendFailed(str(error), counts=False) from error
            if wanted is None:
                return await self._finish([self.rest.ended()])
            path, body = wanted
        number, began = replica.begin(self.asked), time.monotonic()
        self.first_of_rest, self.counted = None, False
        try:
            ids = self.way == continuation.IDS
            sent = outgoing(self.asked, replica, body, ids=ids, plain=self.out.plain)
            if self.sure is not None:
                sent["logprobs"] = sent.get("logprobs") or (True if self.asked.endpoint == CHAT else 1)
            sent = await prepared(self.gateway.upstream, replica, path, sent)
            async with self.gateway.upstream.post(replica, path, sent, self.headers) as response:
                self.out.route = replica.name
                self.client.headers["x-selfspec-backend"] = replica.name
                if self.asked.stream and self.asked.endpoint != EMBEDDINGS:
                    await self._stream(replica, number, began, response)
                else:
                    await self._whole(replica, response)
            replica.succeeded()
        except BrokenStream as error:
            raise BackendFailed(str(error)) from error
        finally:
            self._ended(replica, number)

    def _ended(self, replica: Replica, number: int) -> None:
        """The backend has done with it, well or not."""
        out, tpot = self.out, None
        if not self.counted and not self.finished and (events := replica.flights[number].events):
            out.prompt_tokens = len(self.kept.prompt_ids()) or round(self.asked.prompt_tokens)
            out.tokens = len(self.kept.token_ids()) or events
            self.counted = True
        single = self.rest is None and self.asked.answers == 1
        if self.finished and single and out.tokens and out.tokens > 1 and self.first and self.last:
            tpot = (self.last - self.first) / (out.tokens - 1)
            out.tpot = tpot
        seconds = replica.end(number, tpot if out.tokens and out.tokens >= 4 else None)
        out.machine_seconds = (out.machine_seconds or 0.0) + seconds
        own = replica.settings
        priced = own.price_hour / 3600 * seconds if own.price_hour else 0.0
        if self.counted:  # what others generated before is part of the prompt here
            prompt, tokens = (out.prompt_tokens or 0) + self.tokens_before, (out.tokens or 0) - self.tokens_before
            priced += (prompt * own.price_in + tokens * own.price_out) / 1e6
        if own.price_hour or own.price_in or own.price_out:
            out.cost = (out.cost or 0.0) + priced

    # ---- an answer in one piece --------------------------------------------------------------------------------------

    async def _whole(self, replica: Replica, response: Any) -> None:
        parts = [part async for part in self.gateway.upstream.parts(response)]
        raw = b"".join(parts)
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BrokenStream(f"the answer is not JSON: {raw[:80]!r}") from error
        if not isinstance(found, dict) or ("choices" not in found and "data" not in found):
            raise BrokenStream(f"what came is no answer: {raw[:80]!r}")
        self._usage_of(found)
        if self.sure is not None:
            sure = sureness(found)
            if self.asked.body.get("logprobs") in (None, False):
                for choice in found["choices"]:
                    choice["logprobs"] = None  # the client has not asked for them
                raw = orjson.dumps(found)
            if sure is not None and sure < self.sure:
                self.out.reason += "_unsure"
                self.spare = (replica, raw)
                raise BackendFailed(f"its answer is sure to {sure:.2f} alone", counts=False)
        self.finished = True
        await self.client.whole(200, raw)

    # ---- a stream ----------------------------------------------------------------------------------------------------

    async def _stream(self, replica: Replica, number: int, began: float, response: Any) -> None:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise BrokenStream(f"a stream was asked for, and {kind or 'something without a type'} came")
        try:
            made = await self._events(replica, number, began, response)
        except BrokenStream:
            if not self.finished:
                raise
            made = []  # the client has the whole answer: only what follows it is missing
        await self._finish(made)
        if not response.ended:  # then the connection can be used again
            with suppress(OSError):
                await response.read(DRAIN_SECONDS)

    async def _events(self, replica: Replica, number: int, began: float, response: Any) -> list[bytes]:
        """Send what comes up to [DONE]; returns what came with that, which is still to be sent."""
        frames, done = Frames(), False
        async for part in self.gateway.upstream.parts(response):
            made: list[bytes] = []
            broken: BrokenStream | None = None
            try:
                done = self._take(frames.feed(part), made)
            except BrokenStream as error:
                broken = error  # what came before it is remembered as sent, so it has to be
            if made:
                at = time.monotonic()
                if self.first is None:
                    self.first = at
                    self.out.ttft = at - self.asked.began
                self.last = at
                if not done:  # its end is sent with it: each write is a system call
                    await self.client.part(END.join([*made, b""]))
                if self.first_of_rest is None:  # learnt from it when it is on its way
                    self.first_of_rest = at
                    replica.first_token(number, at - began)
                    replica.succeeded()
                replica.came(number, len(made))
            if broken is not None:
                raise broken
            if done:
                return made
        raise BrokenStream("the stream ended before the answer did")

    def _take(self, found: list[bytes], made: list[bytes]) -> bool:
        """Put events as the client gets them into `made`; whether the last one of the answer was among them.

        Raises:
            BrokenStream: one of them is no event; those before it are in `made`.
        """
        for event in found:
            if not event:
                continue
            events.check(event)
            if events.is_done(event):
                return True
            if (taken := self._event(event)) is not None:
                made.append(taken)
        return False

    def _event(self, event: bytes) -> bytes | None:
        """An event as the client gets it; None for one that it does not get."""
        if events.is_usage(event):
            return self._usage(event)
        if found := events.finishes(event):
            self.ends += found
            self.finished = self.ends >= self.asked.answers
        if self.rest is None:
            return self.kept.take(event)
        if self.way == continuation.IDS:
            return self.rest.event(self.kept.take(event))
        converted = self.rest.event(event)
        if converted is not None:
            self.kept.whole.append(converted)
        return converted

    def _usage(self, event: bytes) -> bytes | None:
        found = orjson.loads(events.payload(event))
        if self.rest is not None and self.way == continuation.IDS:
            prompt = len(self.kept.prompt_ids())
            found["usage"] = continuation.usage(found.get("usage") or {}, prompt, self.tokens_before)
            event = b"data: " + orjson.dumps(found)
        self._usage_of(found)
        if not (self.asked.body.get("stream_options") or {}).get("include_usage"):
            return None
        return event if self.rest is None else self.rest.event(event)

    def _usage_of(self, found: dict[str, Any]) -> None:
        self.out.usage(found.get("usage"))
        self.counted = self.counted or bool(found.get("usage"))

    async def _finish(self, more: list[bytes]) -> None:
        self.finished = True
        if self.out.tokens is None and self.way == continuation.IDS and self.kept.tokens:
            self.out.tokens, self.counted = len(self.kept.token_ids()), True
        await self.client.last(END.join([*more, events.DONE, b""]))
