"""The gateway: what it knows, and the way of one request through it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.batching import Batch
from selfspec_cli.gateway.caching import Caching
from selfspec_cli.gateway.client import Client, Memory, Receive, Scope, Send, Vanished, watch
from selfspec_cli.gateway.errors import GatewayError, bad_request, unavailable
from selfspec_cli.gateway.limits import Keys, Tenant
from selfspec_cli.gateway.log import RequestLog
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.places import Places
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Choice, Chooser, Ended
from selfspec_cli.gateway.relay import Relay
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.gateway.telemetry import Telemetry, Tracing
from selfspec_cli.gateway.upstream import Upstream
from selfspec_cli.record.gateway_log import ASKED_FOR, Ledger

VANISHED = 499  # of the log and the metrics; the client is gone
LEARNT = 0.05  # weight of a new request in means over requests
ROUTES_KEPT = 10_000  # requests whose answers may still be judged
TEXT_KEPT = 2000  # characters of each
BODIES = 16  # of the largest size, that may be in the gateway at once
LONG_BODY = 1 << 20  # bytes; a longer one is parsed in another thread
SEED = 0  # of the choice of the ledger's baseline


class Gateway:
    """Everything that lasts longer than a request. replicas: in the order of the settings. routes: by tenant and id,
    what a request was and who answered it."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[Replica],
        upstream: Upstream,
        log: RequestLog,
        caching: Caching,
    ) -> None:
        self.replicas, self.upstream, self.log, self.caching = list(replicas), upstream, log, caching
        self.telemetry = Telemetry()
        self.tracing = Tracing()
        self.ledger = Ledger()
        self.memory = Memory(0)
        self.batch = Batch(self._free)
        self.places = Places(lambda request: bool(self._free(request)))
        self.draining = False
        self.inside = 0
        self.routes: dict[tuple[str, str], tuple[Request, str]] = {}
        self.tokens_per_char = 0.25
        self.answer_tokens: dict[tuple[str, str], float] = {}
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
        self.choosers: dict[str, Chooser] = {}

    # ---- routes ------------------------------------------------------------------------------------------------------

    def candidates(self, request: Request, named: str | None = None) -> list[Replica]:
        """Backends for the model of a request: those that are sound. Where none is, all that are up and have not asked
        to be left alone: breakers must never refuse what no backend was asked. named: this one alone."""
        fit = [one for one in self.replicas if one.takes(request.model) and one.up() and named in (None, one.name)]
        return [one for one in fit if one.sound()] or [one for one in fit if not one.backoff()]

    def _free(self, request: Request) -> list[Replica]:
        """Those of them that the client would have and that have room."""
        return [one for one in self.candidates(request, request.backend) if one.has_room()]

    def chooser(self, name: str) -> Chooser:
        """The chooser of a policy, made when it is first asked for; raises GatewayError (400) for an unknown one."""
        if name not in self.choosers:
            try:
                policy = POLICIES[name]
                options = policy.settings(self.settings.policy_options)
                self.choosers[name] = policy.make(options, self.settings.slo)
            except SettingsError as error:
                raise bad_request(str(error), "policy") from error
        return self.choosers[name]

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        """The order in which these backends are tried for a request."""
        return self.chooser(request.policy or self.settings.policy).choose(request, replicas)

    def _check_model(self, request: Request) -> None:
        if not any(one.takes(request.model) for one in self.replicas):
            known = dict.fromkeys(name for one in self.replicas for name in (*one.models, *one.settings.serves))
            problem = closest(request.model, known or ("none yet",), "model")
            if missing := [one.name for one in self.replicas if not one.models]:
                raise unavailable(
                    f"{problem}; not up yet: {', '.join(missing)}", param="model", logged="no such model yet"
                )
            raise GatewayError(
                problem, 404, "invalid_request_error", param="model", code="model_not_found", logged="no such model"
            )
        names = [one.name for one in self.replicas]
        if request.backend is not None and request.backend not in names:
            raise bad_request(closest(request.backend, names, "backend"), "backend")

    async def _route(self, request: Request, out: Outcome) -> Choice:
        """Where a request goes; raises GatewayError (503) where nobody takes it."""
        fit = self.candidates(request, request.backend)
        if not fit:
            waits = [one.backoff() for one in self.replicas if one.takes(request.model) and one.up()]
            raise unavailable(
                "no backend takes requests for this model now", min(waits, default=1.0), backend=request.backend
            )
        if not await self.places.wait(request, self.settings.limits.queue_seconds):
            raise unavailable(
                "every backend for this model is full",
                self.settings.limits.queue_seconds or 1.0,
                backend=request.backend,
            )
        free = self._free(request)
        out.policy = request.policy or self.settings.policy
        if request.backend is not None:
            return Choice(tuple(free), ASKED_FOR)
        if out.plain:
            return Choice(tuple(free), "plain")
        return self.choose(request, free)

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
        if request.prompt_chars:
            request.prompt_tokens = request.prompt_chars * self.tokens_per_char
        expected = self.answer_tokens.get((request.endpoint, request.model), float(requests.EXPECTED))
        request.expected_tokens = min(expected, request.most_tokens or expected)
        if request.body.get("ignore_eos") and request.most_tokens:
            request.expected_tokens = request.most_tokens
        if request.policy is not None:
            self.chooser(request.policy)
        self._check_model(request)
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
        relay = Relay(self, request, out, client, choice)
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
        self._learn(request, out)
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

    def _learn(self, request: Request, out: Outcome) -> None:
        if out.status != 200 or out.route is None:
            return
        text = request.text  # its ends say what it was about; thousands of whole prompts would be too much to keep
        text = text if len(text) <= TEXT_KEPT else text[: TEXT_KEPT // 2] + text[-TEXT_KEPT // 2 :]
        kept = Request(request.endpoint, {"model": request.model}, text=text)
        self.routes[request.tenant, request.id] = (kept, out.route)
        while len(self.routes) > ROUTES_KEPT:
            self.routes.pop(next(iter(self.routes)))
        if out.cache in ("hit", "shared"):
            return
        if request.prompt_chars and out.prompt_tokens:
            self.tokens_per_char += LEARNT * (out.prompt_tokens / request.prompt_chars - self.tokens_per_char)
        if out.tokens is not None:
            key = (request.endpoint, request.model)
            before = self.answer_tokens.get(key, float(out.tokens))
            self.answer_tokens[key] = before + LEARNT * (out.tokens - before)
            while len(self.answer_tokens) > ROUTES_KEPT:
                self.answer_tokens.pop(next(iter(self.answer_tokens)))
        self._tell(request, out.route, Ended(out.tokens, out.e2e, out.cost))

    def _tell(self, request: Request, route: str, ended: Ended) -> None:
        for chooser in self.choosers.values():
            for replica in self.replicas:
                if replica.name == route:
                    chooser.learn(request, replica, ended)

    def judged(self, tenant: str, request_id: str, quality: float) -> bool:
        """A tenant judged an answer that it got, 0 to 1; False where the request is not known (any more)."""
        found = self.routes.get((tenant, request_id))
        if found is None:
            return False
        self.chooser(self.settings.policy)
        self._tell(*found, Ended(quality=quality))
        return True


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
