"""The gateway: what it knows, and the way of one request through it."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.cache import AnswerCache, Caching
from selfspec_cli.gateway.client import Client, Memory, Receive, Scope, Send, Vanished, watch
from selfspec_cli.gateway.limits import Keys, Meter, check_model
from selfspec_cli.gateway.policies.base import Choice
from selfspec_cli.gateway.relay import Relay
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import FILE, Outcome, Request, RequestLog
from selfspec_cli.gateway.routing import Batch, Places, Routing
from selfspec_cli.gateway.settings import GatewaySettings, KeySettings
from selfspec_cli.gateway.supervisor import replica
from selfspec_cli.gateway.telemetry import Telemetry, Tracing
from selfspec_cli.gateway.upstream import Upstream
from selfspec_cli.gateway.wire import GatewayError, unavailable
from selfspec_cli.record.gateway_log import ASKED_FOR, FOLDER, Ledger

VANISHED = 499  # of the log and the metrics; the client is gone
BODIES = 16  # of the largest size, that may be in the gateway at once
LONG_BODY = 1 << 20  # bytes; a longer one is parsed in another thread
SEED = 0  # of the choice of the ledger's baseline
CACHE, LIMITS = "answers.sqlite", "limits.sqlite"


class Gateway:
    """What lasts longer than a request. folder: of its files. tell: called where a backend is drained or resumed."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises SettingsError: a file that is in the way."""
        self.folder = Path(settings.results_dir) / FOLDER
        self.log = RequestLog(self.folder / FILE, settings.log_text)
        cache = AnswerCache(self.folder / CACHE) if settings.cache.mib else None
        self.upstream, self.caching = Upstream(settings.limits), Caching(settings.cache, cache, self.log.fault)
        self.meter = Meter(self.folder / LIMITS)
        self.routing = Routing(settings, [replica(one) for one in settings.backends])
        self.tell: Callable[[str, bool], None] = lambda name, drains: None
        self.telemetry = Telemetry()
        self.tracing = Tracing()
        self.ledger = Ledger()
        self.memory = Memory()
        self.batch = Batch(self.routing.free)
        self.places = Places(self.routing.free)
        self.draining = False
        self.inside = 0
        self._random = random.Random(SEED)
        self.take(settings)

    def take(self, settings: GatewaySettings) -> None:
        """Use these settings from now on; requests in the gateway keep those that they began with."""
        self.settings = settings
        self.upstream.limits = settings.limits
        self.caching.settings = settings.cache
        self.log.text = settings.log_text
        self.memory.most = int(max(1, BODIES // settings.workers) * settings.limits.body_mib * 2**20)
        self.keys = Keys(settings.keys)
        self.routing.take(settings)

    @property
    def replicas(self) -> list[Replica]:
        return self.routing.replicas

    async def _route(self, out: Outcome) -> Choice:
        """Where a request goes; raises GatewayError (503) where nobody takes it."""
        request = out.request
        if not self.routing.candidates(request):
            waits = [replica.backoff() for replica in self.routing.up(request)]
            said = "no backend takes requests for this model now"
            raise unavailable(said, min(waits, default=1.0), backend=request.backend)
        seconds = self.settings.limits.queue_seconds
        if not await self.places.wait(request, seconds):
            raise unavailable("every backend for this model is full", seconds, backend=request.backend)
        free = self.routing.free(request)
        out.policy = request.policy or self.settings.policy
        if request.backend is not None:
            return Choice(tuple(free), ASKED_FOR)
        if out.plain:
            return Choice(tuple(free), "plain")
        return self.routing.choose(request, free)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, tenant: KeySettings) -> None:
        """ASGI, for the endpoints of models. Nothing that one request does ends the gateway."""
        headers = Headers(scope=scope)
        client, task = Client(send, {}), asyncio.current_task()
        out: Outcome | None = None
        assert task is not None
        self.inside += 1
        entered, held = False, 0
        watching: asyncio.Task[str] | None = None
        limits = self.settings.limits
        try:
            if self.draining or self.inside > limits.at_once:
                raise unavailable("the gateway is ending" if self.draining else "too many requests at once")
            self.meter.enter(tenant)
            entered = True
            raw = await self.memory.read(receive, int(limits.body_mib * 2**20), limits.unread_seconds)
            held = len(raw)
            request = await self._read(scope["path"], raw, headers, tenant)
            del raw
            out = Outcome(request)
            watching = asyncio.ensure_future(watch(receive, client, task, limits.unread_seconds))
            with self.tracing.span(scope["path"], headers) as span:
                async with asyncio.timeout(limits.request_seconds):
                    await self._answer(out, client)
                out.status = out.status or 200
                if span is not None:
                    _annotate(span, out)
        except Vanished:
            pass
        except asyncio.CancelledError:
            if watching is None or not watching.done() or not watching.result():
                raise  # the server ends
            task.uncancel()
            if out is not None:
                out.status, out.error = VANISHED, watching.result()
        except Exception as error:  # a fault of ours is this request's alone
            known = self._known(error)
            if out is not None:
                out.status, out.error = known.status, known.logged
            with suppress(OSError):
                await client.fail(known, named=scope["path"] == requests.RESPONSES)
        finally:
            self.inside -= 1
            self.memory.free(held)
            if watching is not None:
                watching.cancel()
            self._done(out, tenant if entered else None)

    def _known(self, error: Exception) -> GatewayError:
        if isinstance(error, GatewayError):
            return error
        if isinstance(error, TimeoutError):
            seconds = self.settings.limits.request_seconds
            return GatewayError(f"the request had not ended after {seconds:g} s", 504, "timeout")
        return self.fault(error)

    def fault(self, error: Exception) -> GatewayError:
        """What a client is answered after a fault of the gateway's own, which is logged."""
        self.log.fault(error)
        return GatewayError(f"the gateway failed: {type(error).__name__}", 500, "internal_error")

    async def _read(self, path: str, raw: bytes, headers: Headers, tenant: KeySettings) -> Request:
        if len(raw) > LONG_BODY:
            request = await asyncio.to_thread(requests.read, path, raw, headers)
        else:
            request = requests.read(path, raw, headers)
        request.tenant = tenant.name
        self.routing.estimate(request)
        if request.policy is not None:
            self.routing.chooser(request.policy)
        self.routing.check_model(request)
        check_model(tenant, request.model)
        return request

    async def _answer(self, out: Outcome, client: Client) -> None:
        out.plain = self._random.random() < self.settings.ledger.plain_share and out.request.backend is None
        if out.plain or not await self.caching.answered(out, client, self._ask):
            await self._ask(out, client)

    async def _ask(self, out: Outcome, client: Client) -> None:
        request = out.request
        reason = ""
        if request.kind == "batch":
            reason = "_" + await self.batch.wait(request)
        choice = await self._route(out)
        if (waited := time.monotonic() - request.began) and (reason or waited > 0.01):
            out.waited = waited
        out.reason = choice.reason + reason
        out.expect(choice.order[0].predict(request))
        relay = Relay(self.routing, self.upstream, self.telemetry, out, client, choice)
        self.tracing.inject(relay.headers)
        await relay.run()

    def _done(self, out: Outcome | None, tenant: KeySettings | None) -> None:
        """Count and log a request that has ended, and let the next ones go."""
        if tenant is not None:
            tokens = 0 if out is None else (out.prompt_tokens or 0) + (out.tokens or 0)
            try:
                self.meter.leave(tenant, tokens, 0.0 if out is None else out.cost or 0.0)
            except sqlite3.Error as error:  # a disk that is full
                self.log.fault(error)
        self.look()
        if out is None:
            return
        out.e2e = time.monotonic() - out.request.began
        self.routing.learn(out)
        self.telemetry.ended(out)
        row = out.row(self.log.text)
        self.ledger.add(row)
        self.log.add(row)

    def look(self) -> None:
        """A place may have become free: let requests that wait go."""
        self.batch.look()
        self.places.look()

    def looked(self) -> None:
        """A backend was looked at: what waits may go, and what is shown is as it is now."""
        self.look()
        waiting = {"batch": len(self.batch.waiting), "interactive": len(self.places)}
        self.telemetry.now(self.inside, waiting, self.replicas)


def _annotate(span: Any, out: Outcome) -> None:
    """What a trace shows of a request."""
    for name, value in out.row(text=False).items():
        if value is not None and name not in ("id", "tried"):
            span.set_attribute(f"selfspec.{name}", value)
