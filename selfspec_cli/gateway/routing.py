"""Which backends a request can go to, where it waits for one, who chooses, and what is learnt from its answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.errors import bad_request, invalid, unavailable
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Choice, Chooser
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import GatewaySettings

LEARNT = 0.05  # weight of a new request in means over requests
ROUTES_KEPT = 10_000  # requests whose answers may still be judged
ENOUGH = 8  # requests of class `batch` that are let go together, whether or not a backend idles
DEADLINE_SECONDS = 60.0  # a request that names no deadline waits no longer


class Routing:
    """replicas: in the order of the settings. routes: by tenant and id, what a request was and who answered it.
    answer_tokens: mean length of answers, by endpoint and model."""

    def __init__(self, settings: GatewaySettings, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self.routes: dict[tuple[str, str], tuple[Request, str]] = {}
        self.tokens_per_char = 0.25
        self.answer_tokens: dict[tuple[str, str], float] = {}
        self.take(settings)

    def take(self, settings: GatewaySettings) -> None:
        """Use the policy and the options of these settings from now on."""
        self.settings = settings
        self.choosers: dict[str, Chooser] = {}

    def up(self, request: Request) -> list[Replica]:
        """Backends for the model of a request that take requests, whether or not they have failed recently."""
        return [replica for replica in self.replicas if replica.takes(request.model) and replica.up()]

    def candidates(self, request: Request) -> list[Replica]:
        """Backends that the client would have, for the model of a request: those that are sound. Where none is, all
        that are up and have not asked to be left alone: breakers must never refuse what no backend was asked."""
        fit = [replica for replica in self.up(request) if request.backend in (None, replica.name)]
        return [replica for replica in fit if replica.sound()] or [replica for replica in fit if not replica.backoff()]

    def free(self, request: Request) -> list[Replica]:
        return [replica for replica in self.candidates(request) if replica.has_room()]

    def models(self) -> list[str]:
        """Every name that a client may use for a model, once."""
        names = (name for one in self.replicas for name in (*one.models, *one.settings.serves))
        return list(dict.fromkeys(names))

    def chooser(self, name: str) -> Chooser:
        """The chooser of a policy, made when it is first asked for; raises GatewayError (400) for an unknown one."""
        if name not in self.choosers:
            try:
                policy = POLICIES[name]
                options = policy.settings(self.settings.policy_options, self.settings.workers)
                self.choosers[name] = policy.make(options, self.settings.slo)
            except SettingsError as error:
                raise bad_request(str(error), "policy") from error
        return self.choosers[name]

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        """The order in which these backends are tried for a request."""
        return self.chooser(request.policy or self.settings.policy).choose(request, replicas)

    def check_model(self, request: Request) -> None:
        """Raises GatewayError (404, 503, 400) for a model or a backend that is not known."""
        if not any(replica.takes(request.model) for replica in self.replicas):
            problem = closest(request.model, self.models() or ("none yet",), "model")
            if missing := [replica.name for replica in self.replicas if not replica.models]:
                problem += f"; not up yet: {', '.join(missing)}"
                raise unavailable(problem, param="model", logged="no such model yet")
            raise invalid(problem, 404, param="model", code="model_not_found", logged="no such model")
        names = [replica.name for replica in self.replicas]
        if request.backend is not None and request.backend not in names:
            raise bad_request(closest(request.backend, names, "backend"), "backend")

    def estimate(self, request: Request) -> None:
        """Fill in the tokens of the prompt and of the answer that are expected."""
        if request.prompt_chars:
            request.prompt_tokens = request.prompt_chars * self.tokens_per_char
        expected = self.answer_tokens.get((request.endpoint, request.model), float(requests.EXPECTED))
        request.expected_tokens = min(expected, request.most_tokens or expected)
        if request.body.get("ignore_eos") and request.most_tokens:
            request.expected_tokens = request.most_tokens

    def learn(self, request: Request, out: Outcome) -> None:
        """A request has ended: what it took is expected of the next ones."""
        if out.status != 200 or out.route is None:
            return
        kept = Request(request.endpoint, {"model": request.model}, text=request.excerpt)
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

    def judged(self, tenant: str, request_id: str, quality: float) -> bool:
        """A tenant judged an answer that it got, 0 to 1; False where the request is not known (any more)."""
        found = self.routes.get((tenant, request_id))
        if found is None:
            return False
        request, route = found
        self.chooser(self.settings.policy)
        for replica in self.replicas:
            if replica.name == route:
                for chooser in self.choosers.values():
                    chooser.learn(request, replica, quality)
        return True


class Batch:
    """Requests of class `batch` wait until a backend idles, enough of them are there, or their deadline comes.

    candidates: backends that could take a request now. `look` lets requests go where a reason is there; it is called
    when a request comes, when one ends, and when backends were looked at. The oldest deadline goes first.
    """

    def __init__(self, candidates: Callable[[Request], list[Replica]]) -> None:
        self.candidates = candidates
        self.waiting: list[tuple[float, Request, asyncio.Future[str]]] = []  # with the deadline of each

    async def wait(self, request: Request) -> str:
        """Returns when the request may go, and says why: idle, enough or deadline."""
        deadline = request.deadline or request.began + DEADLINE_SECONDS
        entry = (deadline, request, asyncio.get_running_loop().create_future())
        self.waiting.append(entry)
        try:
            self.look()
            return await asyncio.wait_for(entry[2], deadline - request.began)
        except TimeoutError:
            return "deadline"
        finally:
            self.waiting.remove(entry)

    def look(self) -> None:
        """Let go whatever has a reason to: one request for each backend that idles, or all when enough wait."""
        waiting = sorted((one for one in self.waiting if not one[2].done()), key=lambda one: one[0])
        enough = len(waiting) >= ENOUGH
        taken: set[Replica] = set()
        for _, request, ready in waiting:
            idle = [one for one in self.candidates(request) if not one.running() and one not in taken]
            if enough:
                ready.set_result("enough")
            elif idle:
                taken.add(idle[0])
                ready.set_result("idle")


class Places:
    """Requests that wait for a place, fair by tenant.

    free: whether a backend has room for a request now. waiting: by tenant; the one served last is last. `look` lets one
    request go; it is called whenever a place may have become free.
    """

    def __init__(self, free: Callable[[Request], bool]) -> None:
        self.free = free
        self.waiting: dict[str, deque[tuple[Request, asyncio.Future[None]]]] = {}
        self._going = False  # one was let go and has not begun yet, so its place still looks free

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    async def wait(self, request: Request, seconds: float) -> bool:
        """Wait until there is a place; False where there was none in so many seconds."""
        if not self.waiting and self.free(request):
            return True
        loop = asyncio.get_running_loop()
        entry = (request, loop.create_future())
        self.waiting.setdefault(request.tenant, deque()).append(entry)
        try:
            self.look()
            await asyncio.wait_for(entry[1], seconds)
            return self.free(request)
        except TimeoutError:
            return False
        finally:
            self._going = self._going and (entry[1].cancelled() or not entry[1].done())
            self.waiting[request.tenant].remove(entry)
            if not self.waiting[request.tenant]:
                del self.waiting[request.tenant]
            loop.call_soon(self.look)  # there may be another place

    def look(self) -> None:
        """Let the first request of the next tenant go that finds a place."""
        for tenant, queue in () if self._going else self.waiting.items():
            ready = next((ready for request, ready in queue if not ready.done() and self.free(request)), None)
            if ready is not None:
                self.waiting[tenant], self._going = self.waiting.pop(tenant), True
                return ready.set_result(None)
