"""The gateway: what it knows, and the way of one request through it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.batching import Batch
from selfspec_cli.gateway.caching import Caching
from selfspec_cli.gateway.client import Client, Memory, Receive, Scope, Send, Vanished, watch
from selfspec_cli.gateway.errors import GatewayError, unavailable
from selfspec_cli.gateway.limits import Keys, Tenant
from selfspec_cli.gateway.log import RequestLog
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.places import Places
from selfspec_cli.gateway.policies.base import Choice
from selfspec_cli.gateway.relay import Relay
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.routing import Routing
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.gateway.telemetry import Telemetry, Tracing
from selfspec_cli.gateway.upstream import Upstream
from selfspec_cli.record.gateway_log import ASKED_FOR, Ledger

VANISHED = 499  # of the log and the metrics; the client is gone
BODIES = 16  # of the largest size, that may be in the gateway at once
LONG_BODY = 1 << 20  # bytes; a longer one is parsed in another thread
SEED = 0  # of the choice of the ledger's baseline


class Gateway:
    """Everything that lasts longer than a request."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[Replica],
        upstream: Upstream,
        log: RequestLog,
        caching: Caching,
    ) -> None:
        self.upstream, self.log, self.caching = upstream, log, caching
        self.routing = Routing(settings, replicas)
        self.telemetry = Telemetry()
        self.tracing = Tracing()
        self.ledger = Ledger()
        self.memory = Memory(0)
        self.batch = Batch(self.routing.free)
        self.places = Places(lambda request: bool(self.routing.free(request)))
        self.draining = False
        self.inside = 0
        self._random = random.Random(SEED)
        self.keys = Keys(())
        self.take(settings)

    def take(self, settings: GatewaySettings) -> None:
        """Use these settings from now on; requests in the gateway keep those that they began with."""
        self.settings = settings
        self.upstream.limits = settings.limits
        self.caching.settings = settings.cache
        self.log.text = settings.log_text
        self.memory.most = int(BODIES * settings.limits.body_mib * 2**20)
        self.keys = Keys(settings.keys, before=self.keys)
        self.routing.take(settings)

    @property
    def replicas(self) -> list[Replica]:
        """The backends, in the order of the settings."""
        return self.routing.replicas

    async def _route(self, request: Request, out: Outcome) -> Choice:
        """Where a request goes; raises GatewayError (503) where nobody takes it."""
        fit = self.routing.candidates(request, request.backend)
        if not fit:
            waits = [replica.backoff() for replica in self.routing.up(request)]
            raise unavailable(
                "no backend takes requests for this model now", min(waits, default=1.0), backend=request.backend
            )
        if not await self.places.wait(request, self.settings.limits.queue_seconds):
            raise unavailable(
                "every backend for this model is full",
                self.settings.limits.queue_seconds or 1.0,
                backend=request.backend,
            )
        free = self.routing.free(request)
        out.policy = request.policy or self.settings.policy
        if request.backend is not None:
            return Choice(tuple(free), ASKED_FOR)
        if out.plain:
            return Choice(tuple(free), "plain")
        return self.routing.choose(request, free)

    # ---- one request -------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send, tenant: Tenant) -> None:
        """ASGI, for the endpoints of models. Nothing that one request does ends the gateway."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
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
            tenant.enter()
            entered = True
            raw = await self.memory.read(receive, int(limits.body_mib * 2**20), limits.unread_seconds)
            held = len(raw)
            request = await self._read(scope["path"], raw, headers, tenant)
            del raw
            out = Outcome(request)
            watching = watch(receive, client, task, limits.unread_seconds)
            with self.tracing.span(scope["path"], headers) as span:
                async with asyncio.timeout(limits.request_seconds):
                    await self._answer(request, out, client)
                out.status = out.status or 200
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
        name = type(error).__name__
        return GatewayError(f"the gateway failed: {name}", 500, "internal_error", logged=f"the gateway failed: {name}")

    async def _read(self, path: str, raw: bytes, headers: dict[str, str], tenant: Tenant) -> Request:
        if len(raw) > LONG_BODY:
            request = await asyncio.to_thread(requests.read, path, raw, headers)
        else:
            request = requests.read(path, raw, headers)
        request.tenant = tenant.name
        self.routing.estimate(request)
        if request.policy is not None:
            self.routing.chooser(request.policy)
        self.routing.check_model(request)
        tenant.check_model(request.model)
        return request

    async def _answer(self, request: Request, out: Outcome, client: Client) -> None:
        out.plain = self._random.random() < self.settings.ledger.plain_share and request.backend is None
        if out.plain or not await self.caching.answered(request, out, client, self._ask):
            await self._ask(request, out, client)

    async def _ask(self, request: Request, out: Outcome, client: Client) -> None:
        """Have a backend answer."""
        reason = ""
        if request.kind == "batch":
            reason = "_" + await self.batch.wait(request)
        choice = await self._route(request, out)
        if (waited := time.monotonic() - request.began) and (reason or waited > 0.01):
            out.waited = waited
        out.reason = choice.reason + reason
        out.expect(choice.order[0].predict(request))
        relay = Relay(self.routing, self.upstream, self.telemetry, request, out, client, choice)
        self.tracing.inject(relay.headers)
        await relay.run()

    def _done(self, out: Outcome | None, tenant: Tenant | None) -> None:
        """Count and log a request that has ended, and let the next ones go."""
        if tenant is not None:
            tokens = 0 if out is None else (out.prompt_tokens or 0) + (out.tokens or 0)
            tenant.leave(tokens, 0.0 if out is None else out.cost or 0.0)
        self.look()
        if out is None:
            return
        request = out.request
        out.e2e = time.monotonic() - request.began
        self.routing.learn(request, out)
        self.telemetry.ended(out)
        row = out.row(self.log.text)
        self.ledger.add(row)
        self.log.add(row)

    def look(self) -> None:
        """A place may have become free: let requests that wait go."""
        if self.batch.waiting:
            self.batch.look()
        if self.places.waiting:
            self.places.look()


def _annotate(span: Any, out: Outcome) -> None:
    """What a trace shows of a request."""
    if span is None:
        return
    shown = {
        "route": out.route,
        "reason": out.reason,
        "policy": out.policy,
        "cache": out.cache,
        "tokens": out.tokens,
        "ttft_s": out.ttft,
        "tpot_s": out.tpot,
        "cost": out.cost,
        "survived": out.survived,
        "status": out.status,
        "expected_ttft_s": out.expected_ttft,
        "expected_tpot_s": out.expected_tpot,
    }
    for name, value in shown.items():
        if value is not None:
            span.set_attribute(f"selfspec.{name}", value)
