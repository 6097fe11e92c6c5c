"""One answer, from the backends that are tried to the client, as a machine of four states.

    asking      the client has nothing yet: the backends of the order are tried one after the other
    sending     a part of a backend's stream is at the client
    continuing  that backend broke off: another one with the same weights is asked for the rest
    ended       the client has everything

asking -> ended for an answer in one piece or a refusal; asking -> sending -> ended for a stream; sending -> continuing
-> sending for each backend that breaks off. A failure while asking or continuing leaves the state
as it is; the next backend is tried.
"""

import time
from contextlib import suppress
from enum import StrEnum
from typing import Any

import aiohttp

from selfspec_cli.gateway.client import Client
from selfspec_cli.gateway.continuation import Answer, ResponsesAnswer, Way, by_ids
from selfspec_cli.gateway.policies.base import Choice
from selfspec_cli.gateway.policies.cascade import sureness
from selfspec_cli.gateway.replica import Flight, Replica
from selfspec_cli.gateway.request import CHAT, RESPONSES, Outcome, Request
from selfspec_cli.gateway.routing import Routing
from selfspec_cli.gateway.telemetry import Telemetry
from selfspec_cli.gateway.upstream import BackendFailed, Cause, Refused, Upstream, outgoing, prepared
from selfspec_cli.gateway.wire import BrokenStream, GatewayError, Parser, dumps, loads, of_backend, unavailable

ATTEMPTS = 3  # backends that are tried for one request, and as many for the rest of a stream
FEWEST = 4  # tokens of an answer from which the tokens of an event are learnt
DRAIN_SECONDS = 0.5  # for the end of a response, after the last event of the answer


class State(StrEnum):
    """Of an answer on its way."""

    asking = "asking"
    sending = "sending"
    continuing = "continuing"
    ended = "ended"


class Relay:
    """tries: backends that were tried, and the next. sure: least probability of an answer that is taken. unsure:
    (backend, answer) of a cascade, sent if no other comes. answer: the client's side of a stream. way: to the rest."""

    def __init__(
        self, routing: Routing, upstream: Upstream, telemetry: Telemetry, out: Outcome, client: Client, choice: Choice
    ) -> None:
        self.upstream, self.telemetry = upstream, telemetry
        self.request, self.out, self.client = out.request, out, client
        self.limits = routing.settings.limits
        self.sure = choice.sure
        self.headers = {"x-request-id": self.request.id}
        self.state = State.asking
        self.tries = Tries(routing, telemetry, self.request, choice)
        self.unsure: tuple[Replica, bytes] | None = None
        self.answer = Answer(self.request)
        self.way: Way | None = None
        self._counted = False  # the tokens of what the backend of now does are known
        self._last_sent = self._broke_at = 0.0

    async def run(self) -> None:
        """Answer the request. Raises GatewayError where nobody could, which the caller tells the client."""
        while self.state is not State.ended:
            replica = self._next()
            if replica is None:
                return await self._send_unsure()
            try:
                await self._ask(replica)
                self.tries.blame()
            except Refused as error:
                replica.breaker.succeeded()
                if self.state is not State.asking:
                    self.tries.failed(replica, BackendFailed(f"{replica.name} refused to continue", cause=Cause.nobody))
                    raise self.tries.broken() from error
                if self.unsure is None:
                    self.out.route = replica.name
                    self.client.headers["x-selfspec-backend"] = replica.name
                    raise of_backend(error.status, error.raw, replica.name) from error
            except BackendFailed as error:
                self.out.tried.append(replica.name)
                self.tries.failed(replica, error)
                if self.state is State.sending:
                    self.state = State.continuing
                    self._broke_at = self._last_sent

    def _next(self) -> Replica | None:
        """The backend that is tried now; None to send the answer of which its backend was unsure."""
        if self.state is not State.asking:
            self.way = self.answer.next_way()
            return self.tries.for_the_rest(self.way)
        replica = self.tries.another(self.unsure is None)
        if replica is None:
            if self.unsure is None:
                raise self.tries.nobody()
            return None
        if self.tries.failures:
            self.out.expect(replica.predict(self.request))
        if replica is self.tries.last:
            self.sure = None  # nobody is left to ask: its answer is taken
        return replica

    # ---- one backend -------------------------------------------------------------------------------------------------

    async def _ask(self, replica: Replica) -> None:
        """Have one backend answer, or send the rest. Raises Refused, and BackendFailed where it broke off."""
        path, body = self.request.endpoint, self.request.body
        if self.state is State.asking and self.request.stream:
            self.answer = ResponsesAnswer(self.request) if path == RESPONSES else Answer(self.request)
            self.answer.ids = by_ids(self.request, replica.vllm)
        elif self.way is not None:
            rest = self.answer.rest(self.way)
            if rest is None:
                return await self._finish(self.answer.at_limit())
            path, body = rest
        self._counted = False
        flight = replica.begin(self.request, self.answer.before)
        try:
            sent = outgoing(self.request, replica, path, body, ids=self.answer.ids, plain=self.out.plain)
            if self.sure is not None:
                sent["logprobs"] = sent.get("logprobs") or (True if path == CHAT else 1)
            sent = await prepared(self.upstream, replica, path, sent)
            seconds = None if self.request.stream else self.limits.request_seconds
            async with self.upstream.post(replica, path, sent, self.headers, seconds=seconds) as response:
                self.out.route = replica.name
                self.client.headers["x-selfspec-backend"] = replica.name
                await (self._stream if self.request.stream else self._whole)(flight, response)
            replica.breaker.succeeded()
        except BrokenStream as error:
            raise BackendFailed(str(error)) from error
        finally:
            self._ended(flight)

    def _ended(self, flight: Flight) -> None:
        """A backend has done with it, well or not: count tokens, the time of its machine and the money."""
        out, own, tokens = self.out, flight.replica.settings, None
        if not self._counted and flight.events:
            out.prompt_tokens = len(self.answer.prompt_ids) or round(self.request.prompt_tokens)
            out.tokens = len(self.answer.token_ids) or flight.before + flight.events
            self._counted = True
        single = self.request.answers == 1 and self.answer.way is Way.first
        done = self.state is State.ended and self.request.stream and not flight.before and single
        if done and out.tokens and out.tokens > 1 and flight.first is not None:
            out.tpot = (flight.last - flight.first) / (out.tokens - 1)
            tokens = out.tokens if out.tokens >= FEWEST else None
        seconds = flight.replica.end(flight, tokens)
        out.machine_s = (out.machine_s or 0.0) + seconds
        price = own.price_hour / 3600 * seconds
        if self._counted:  # what others generated before is part of the prompt here
            prompt, made = (out.prompt_tokens or 0) + flight.before, (out.tokens or 0) - flight.before
            price += (prompt * own.price_in + made * own.price_out) / 1e6
        if own.price_hour or own.price_in or own.price_out:
            out.cost = (out.cost or 0.0) + price

    # ---- an answer in one piece --------------------------------------------------------------------------------------

    async def _whole(self, flight: Flight, response: aiohttp.ClientResponse) -> None:
        raw = await self.upstream.whole(response, self.limits.request_seconds)
        found = answer_of(raw)
        self._usage(found.get("usage"))
        if self.sure is not None:
            sure = sureness(found)
            if self.request.body.get("logprobs") in (None, False):
                for choice in found["choices"]:
                    choice["logprobs"] = None  # the client has not asked for them
                raw = dumps(found)
            if sure is not None and sure < self.sure:
                self.out.reason += "_unsure"
                self.unsure = (flight.replica, raw)
                raise BackendFailed(f"its answer is sure to {sure:.2f} alone", cause=Cause.nobody)
        self.state = State.ended
        await self.client.whole(200, raw)

    async def _send_unsure(self) -> None:
        """Nobody else could answer: the answer of which its backend was not sure is one."""
        assert self.unsure is not None
        replica, raw = self.unsure
        self.out.route, self.state = replica.name, State.ended
        self.client.headers["x-selfspec-backend"] = replica.name
        await self.client.whole(200, raw)

    def _usage(self, usage: Any) -> None:
        self.out.usage(usage)
        self._counted = self._counted or bool(usage)

    # ---- a stream ----------------------------------------------------------------------------------------------------

    async def _stream(self, flight: Flight, response: aiohttp.ClientResponse) -> None:
        kind = response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            raise BrokenStream(f"a stream was asked for, and {kind or 'something without a type'} came")
        try:
            last = await self._events(flight, response)
        except BrokenStream:
            if not self.answer.finished:
                raise
            last = []  # the client has the whole answer: only what follows it is missing
        self._usage(self.answer.usage)
        await self._finish(b"".join(last))
        with suppress(BrokenStream):  # then the connection can be used again
            await self.upstream.whole(response, DRAIN_SECONDS)

    async def _events(self, flight: Flight, response: aiohttp.ClientResponse) -> list[bytes]:
        """Send what comes; returns what came with the end of the answer, which is still to be sent. Raises BrokenStream
        where it broke off, or no event came for too long: comments do not count."""
        parser, until = Parser(), time.monotonic() + self.limits.first_byte_seconds
        while part := await self.upstream.part(response, max(0.0, until - time.monotonic())):
            made: list[bytes] = []
            broken: BrokenStream | None = None
            done = False
            try:
                for event in parser.feed(part):
                    data, done = self.answer.take(event)
                    if data is not None:
                        made.append(data)
                        until = time.monotonic() + self.limits.stall_seconds
                    if done:
                        break
            except BrokenStream as error:
                broken = error  # what came before it is remembered as sent, so it has to be
            except (TypeError, ValueError, AttributeError, LookupError):
                broken = BrokenStream("an event that has not the form of an answer's")
            if made:
                await self._send(flight, made, done)
            if broken is not None:
                raise broken
            if done:
                return made
        raise BrokenStream("the stream ended before the answer did")

    async def _send(self, flight: Flight, made: list[bytes], done: bool) -> None:
        at = self._last_sent = time.monotonic()
        if self.out.ttft is None:
            self.out.ttft = at - self.request.began
        if self.state is State.continuing:
            self._survived(at)
            self.telemetry.survived.labels(flight.replica.name).inc()
        self.state = State.sending
        flight.came(len(made))
        if not done:  # its end is sent with it: each write is a system call
            await self.client.part(b"".join(made))
            flight.held += time.monotonic() - at

    def _survived(self, at: float) -> None:
        self.out.survived += 1
        self.out.lost = (self.out.lost or 0.0) + at - self._broke_at

    async def _finish(self, last: bytes) -> None:
        if self.state is State.continuing:  # all that was missing is the end
            self._survived(time.monotonic())
        self.state = State.ended
        if self.out.tokens is None and self.answer.token_ids:
            self.out.tokens, self._counted = len(self.answer.token_ids), True
        await self.client.part(last + self.answer.END, more=False)


def answer_of(raw: bytes) -> dict[str, Any]:
    """The document of an answer in one piece; raises BrokenStream for what is none."""
    try:
        found = loads(raw)
    except ValueError as error:
        raise BrokenStream("the answer is no JSON") from error
    if not isinstance(found, dict) or found.get("error"):
        raise BrokenStream("what came is no answer")
    choices = found.get("choices")
    fits = isinstance(choices, list) and bool(choices) and all(isinstance(one, dict) for one in choices)
    if not fits and not any(isinstance(found.get(name), list) for name in ("data", "results", "output")):
        raise BrokenStream("what came is no answer")
    return found


class Tries:
    """The backends that one request has tried, and which comes next. failures: in order; whether they are the backends'
    fault shows when another one answers. last: of the choice."""

    def __init__(self, routing: Routing, telemetry: Telemetry, request: Request, choice: Choice) -> None:
        self.routing, self.telemetry, self.request = routing, telemetry, request
        self.failures: list[tuple[Replica, BackendFailed]] = []
        order = choice.order[:ATTEMPTS]
        self.last = order[-1]
        self._order = iter(order)
        self._rest = iter(range(ATTEMPTS))

    def another(self, any_one: bool) -> Replica | None:
        """The choice's next backend. any_one: after these, if all have failed, also one whose breaker is open."""
        replica = next(self._order, None)
        if replica is not None or not any_one or self.request.backend or len(self.failures) >= ATTEMPTS:
            return replica
        new = self._new(self.routing.up(self.request))
        return next((replica for replica in new if replica.has_room() and not replica.backoff()), None)

    def for_the_rest(self, way: Way | None) -> Replica:
        """The backend that sends the rest of a stream; raises GatewayError where nobody can. way: how it is asked."""
        dead = self.failures[-1][0]
        if way is None or next(self._rest, None) is None:
            raise self.broken()
        alike = [one for one in self.routing.up(self.request) if one.weights == dead.weights and one is not dead]
        others = [one for one in alike if (one.vllm or way is Way.again) and not one.backoff()]
        if not others:
            raise self.broken()
        new = self._new(others)
        sound = [replica for replica in new if replica.sound()]
        return self.routing.choose(self.request, sound or new or others).order[0]

    def _new(self, replicas: list[Replica]) -> list[Replica]:
        tried = [replica for replica, _ in self.failures]
        return [replica for replica in replicas if replica not in tried]

    def failed(self, replica: Replica, error: BackendFailed) -> None:
        """A backend failed. Its own fault is counted at once, and what it asks for is honoured."""
        self.failures.append((replica, error))
        if error.cause is Cause.backend:
            replica.breaker.failed()
        if error.retry_after:
            replica.backoff_until = max(replica.backoff_until, replica.now() + error.retry_after)

    def blame(self) -> None:
        """Another backend answered this request, so those that failed before are at fault, and not the request."""
        for replica, error in self.failures:
            if error.cause is Cause.shared:
                replica.breaker.failed()

    def nobody(self) -> GatewayError:
        """The error for a client where every backend failed before the first byte."""
        replica, error = self.failures[-1]
        said, logged = f"backend {replica.name}: {error}", f"backend {replica.name}: HTTP {error.status}"
        seconds = min((replica.retry_after for _, replica in self.failures if replica.retry_after), default=1.0)
        if error.status == 503:
            return unavailable(said, seconds, backend=replica.name, logged=logged)
        headers = {"retry-after": str(round(seconds))} if error.status == 429 else {}
        return GatewayError(said, error.status, "backend_error", backend=replica.name, headers=headers, logged=logged)

    def broken(self) -> GatewayError:
        """The error inside a stream that nobody can continue."""
        replica, error = self.failures[-1]
        self.telemetry.broken.labels(replica.name).inc()
        said = f"backend {replica.name} broke off: {error}; it could not be continued"
        return GatewayError(said, 502, "backend_error", backend=replica.name)
