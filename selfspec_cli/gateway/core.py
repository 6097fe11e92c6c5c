"""The gateway: what it knows, and the way of one request through it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.gateway import asked as requests
from selfspec_cli.gateway import continuation
from selfspec_cli.gateway.asked import Asked
from selfspec_cli.gateway.batching import Batch
from selfspec_cli.gateway.caching import Caching
from selfspec_cli.gateway.client import Client, Receive, Scope, Send, Vanished, read_body, watch
from selfspec_cli.gateway.errors import GatewayError, bad_request
from selfspec_cli.gateway.limits import Keys, Tenant
from selfspec_cli.gateway.log import RequestLog
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Choice, Chooser, Ended
from selfspec_cli.gateway.relay import Relay
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.gateway.telemetry import Telemetry, Tracing
from selfspec_cli.gateway.upstream import Upstream
from selfspec_cli.record.gateway_log import ASKED_FOR, Ledger

VANISHED = 499  # of the log and the metrics; the client is gone
LEARNT = 0.05  # weight of a new request in means over requests
ASKED_KEPT = 10_000  # requests whose answers may still be judged
TEXT_KEPT = 2000  # characters of each


class Gateway:
    """Everything that lasts longer than a request. replicas: in the order of the settings."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[Replica],
        upstream: Upstream,
        log: RequestLog,
        caching: Caching,
    ) -> None:
        self.settings, self.replicas, self.upstream = settings, list(replicas), upstream
        self.log, self.caching = log, caching
        self.telemetry = Telemetry()
        self.tracing = Tracing(settings.tracing)
        self.keys = Keys(settings.keys)
        self.ledger = Ledger()
        self.batch = Batch(settings.batch, self._wanted)
        self.choosers: dict[str, Chooser] = {}
        self.draining = False
        self.inside = 0
        self.routes: dict[tuple[str, str], tuple[Asked, str]] = {}  # by tenant and request id
        self.tokens_per_char = 0.25
        self.answer_tokens: dict[tuple[str, str], float] = {}
        self._random = random.Random(settings.ledger.seed)

    # ---- routes ------------------------------------------------------------------------------------------------------

    def candidates(self, asked: Asked) -> list[Replica]:
        """Backends that serve the model of a request and take requests now."""
        return [one for one in self.replicas if one.takes(asked.model) and one.available()]

    def _wanted(self, asked: Asked) -> list[Replica]:
        """Those of them that the client would have."""
        return [one for one in self.candidates(asked) if asked.backend in (None, one.name)]

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

    def choose(self, asked: Asked, replicas: Sequence[Replica]) -> Choice:
        """The order in which these backends are tried for a request."""
        return self.chooser(asked.policy or self.settings.policy).choose(asked, replicas)

    def _check_model(self, asked: Asked) -> None:
        if not any(one.takes(asked.model) for one in self.replicas):
            known = dict.fromkeys(name for one in self.replicas for name in (*one.models, *one.settings.serves))
            problem = closest(asked.model, known or ("none yet",), "model")
            if missing := [one.name for one in self.replicas if not one.models]:
                raise GatewayError(f"{problem}; not up yet: {', '.join(missing)}", 503, "service_unavailable",
                                   param="model", headers={"retry-after": "1"})  # fmt: skip
            raise GatewayError(problem, 404, "invalid_request_error", param="model")
        names = [one.name for one in self.replicas]
        if asked.backend is not None and asked.backend not in names:
            raise bad_request(closest(asked.backend, names, "backend"), "backend")

    def _route(self, asked: Asked, out: Outcome) -> Choice:
        """Where a request goes; raises GatewayError (503) where nobody takes it."""
        found = self._wanted(asked)
        if not found:
            raise GatewayError("no backend takes requests for this model now", 503, "service_unavailable",
                               backend=asked.backend, headers={"retry-after": "1"})  # fmt: skip
        out.policy = asked.policy or self.settings.policy
        if asked.backend is not None:
            return Choice(tuple(found), ASKED_FOR)
        if out.plain:
            return Choice(tuple(found), "plain")
        return self.choose(asked, found)

    # ---- one request -------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for the endpoints of models. Nothing that one request does ends the gateway."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client, tenant, out, task = Client(send, {}), None, None, asyncio.current_task()
        assert task is not None
        self.inside += 1
        watching: asyncio.Task[str] | None = None
        try:
            if scope["method"] != "POST":
                raise GatewayError(
                    f"{scope['method']} is not allowed here; allowed: POST", 405, "invalid_request_error"
                )
            if self.draining or self.inside > self.settings.limits.at_once:
                reason = "the gateway is ending" if self.draining else "too many requests at once"
                raise GatewayError(reason, 503, "service_unavailable", headers={"retry-after": "1"})
            who = self.keys.tenant(headers.get("authorization", ""))
            who.enter()
            tenant = who
            asked = await self._read(scope["path"], receive, headers, tenant)
            out = Outcome(asked)
            client.headers["x-request-id"] = asked.id
            watching = watch(receive, client, task, self.settings.limits.unread_seconds)
            with self.tracing.span(scope["path"], headers) as span:
                await self._answer(asked, out, client)
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
            known = error if isinstance(error, GatewayError) else self.fault(error)
            if out is not None:
                out.status, out.error = known.status, known.message
            with suppress(OSError):
                await client.fail(known)
        finally:
            self.inside -= 1
            if watching is not None:
                watching.cancel()
            self._done(out, tenant)

    def fault(self, error: Exception) -> GatewayError:
        """What a client is answered after a fault of the gateway's own, which is logged."""
        self.log.fault(error)
        return GatewayError(f"the gateway failed: {type(error).__name__}: {error}", 500, "internal_error")

    async def _read(self, path: str, receive: Receive, headers: dict[str, str], tenant: Tenant) -> Asked:
        limits = self.settings.limits
        raw = await read_body(receive, int(limits.body_mib * 2**20), limits.unread_seconds)
        asked = requests.read(path, raw, headers)
        asked.tenant = tenant.name
        if asked.prompt_chars:
            asked.prompt_tokens = asked.prompt_chars * self.tokens_per_char
        expected = self.answer_tokens.get((asked.endpoint, asked.model), float(requests.EXPECTED))
        asked.expected_tokens = min(expected, asked.most_tokens or expected)
        if asked.body.get("ignore_eos") and asked.most_tokens:
            asked.expected_tokens = asked.most_tokens
        if asked.policy is not None:
            self.chooser(asked.policy)
        self._check_model(asked)
        return asked

    async def _answer(self, asked: Asked, out: Outcome, client: Client) -> None:
        out.plain = self._random.random() < self.settings.ledger.plain_share and asked.backend is None
        if not out.plain and await self.caching.answered(asked, out, client):
            return
        if asked.kind == "batch":
            reason = await self.batch.wait(asked)
            out.waited = time.monotonic() - asked.began
        choice = self._route(asked, out)
        out.reason = choice.reason if asked.kind != "batch" else f"{choice.reason}_{reason}"
        out.expect(choice.order[0].predict(asked))
        relay = Relay(self, asked, out, client, sure=choice.sure)
        if asked.stream and self.settings.survive:
            relay.way = continuation.way(asked, choice.order[0].vllm)
            relay.kept.ids = relay.way == continuation.IDS
            logged = asked.body.get("logprobs") is not None
            relay.kept.everything = relay.way == continuation.AGAIN or (relay.kept.ids and logged)
        relay.headers = {"x-request-id": asked.id}
        self.tracing.inject(relay.headers)
        self.caching.keep(out, client)
        await relay.run(choice.order)
        if relay.finished:
            await self.caching.store(asked, out, client)

    def _done(self, out: Outcome | None, tenant: Tenant | None) -> None:
        """Count and log a request that has ended, and let the next ones go."""
        if tenant is not None:
            tokens = 0 if out is None else (out.prompt_tokens or 0) + (out.tokens or 0)
            tenant.leave(tokens)
        if self.batch.waiting:
            self.batch.look()
        if out is None:
            return
        asked = out.asked
        out.e2e = time.monotonic() - asked.began
        self._learn(asked, out)
        self.telemetry.ended(out)
        row = out.row(self.log.text)
        self.ledger.add(row)
        self.log.add(row)

    def _learn(self, asked: Asked, out: Outcome) -> None:
        if out.status != 200 or out.route is None:
            return
        text = asked.text  # its ends say what it was about; thousands of whole prompts would be too much to keep
        text = text if len(text) <= TEXT_KEPT else text[: TEXT_KEPT // 2] + text[-TEXT_KEPT // 2 :]
        self.routes[asked.tenant, asked.id] = (Asked(asked.endpoint, {"model": asked.model}, text=text), out.route)
        while len(self.routes) > ASKED_KEPT:
            self.routes.pop(next(iter(self.routes)))
        if out.cache == "hit":
            return
        if asked.prompt_chars and out.prompt_tokens:
            self.tokens_per_char += LEARNT * (out.prompt_tokens / asked.prompt_chars - self.tokens_per_char)
        if out.tokens is not None:
            key = (asked.endpoint, asked.model)
            before = self.answer_tokens.get(key, float(out.tokens))
            self.answer_tokens[key] = before + LEARNT * (out.tokens - before)
        self._tell(asked, Ended(self._named(out.route), out.tokens, out.e2e, out.cost))

    def _named(self, name: str) -> Replica:
        return next(one for one in self.replicas if one.name == name)

    def _tell(self, asked: Asked, ended: Ended) -> None:
        for chooser in self.choosers.values():
            chooser.learn(asked, ended)

    def judged(self, tenant: str, request_id: str, quality: float) -> bool:
        """A tenant judged an answer that it got, 0 to 1; False where the request is not known (any more)."""
        found = self.routes.get((tenant, request_id))
        if found is None:
            return False
        asked, route = found
        if any(one.name == route for one in self.replicas):
            self.chooser(self.settings.policy)
            self._tell(asked, Ended(self._named(route), quality=quality))
        return True


def _annotate(span: Any, out: Outcome) -> None:
    """What a trace shows of a request."""
    if span is None:
        return
    shown = {"route": out.route, "reason": out.reason, "policy": out.policy, "cache": out.cache, "tokens": out.tokens,
             "ttft_s": out.ttft, "tpot_s": out.tpot, "cost": out.cost, "survived": out.survived, "status": out.status,
             "expected_ttft_s": out.expected_ttft, "expected_tpot_s": out.expected_tpot}  # fmt: skip
    for name, value in shown.items():
        if value is not None:
            span.set_attribute(f"selfspec.{name}", value)
