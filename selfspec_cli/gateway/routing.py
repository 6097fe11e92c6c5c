"""Which backends a request can go to, who chooses, what answers teach, and queues: of class `batch`, and for places."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.policies.base import Choice, Chooser
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Outcome, Request
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.gateway.wire import bad_request, invalid, unavailable

LEARNT = 0.05  # weight of a new request in means over requests
ROUTES_KEPT = 10_000  # requests whose answers may still be judged
TEXT_KEPT = 2000  # characters of each
ENOUGH = 8  # requests of class `batch` that are let go together, whether or not a backend idles
DEADLINE_SECONDS = 60.0  # a request of that class that names no deadline waits no longer


class Routing:
    """replicas: as in the settings. routes: (request, backend) by tenant and id. answer_tokens: mean, by model."""

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

    def models(self) -> list[str]:
        """Every name that a client may use for a model; `auto` leaves the choice of the model to the gateway too."""
        return list(dict.fromkeys(name for one in self.replicas for name in (*one.models, *one.settings.serves)))

    def up(self, request: Request) -> list[Replica]:
        """Backends for the model of a request that take requests, whether or not they have failed recently."""
        return [replica for replica in self.replicas if replica.takes(request.model) and replica.up()]

    def candidates(self, request: Request) -> list[Replica]:
        """Backends that the client would have, for the model of a request: those that are sound. Where none is, all
        that are up and have not asked to be left alone: breakers must never refuse what no backend was asked."""
        fit = [replica for replica in self.up(request) if request.backend in (None, replica.name)]
        return [replica for replica in fit if replica.sound()] or [replica for replica in fit if not replica.backoff()]

    def free(self, request: Request) -> list[Replica]:
        """Those of them that have room."""
        return [replica for replica in self.candidates(request) if replica.has_room()]

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

    def learn(self, out: Outcome) -> None:
        """A request has ended: what it took is expected of the next ones."""
        request = out.request
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

    def judged(self, tenant: str, request_id: str, quality: float) -> bool:
        """A tenant judged an answer that it got, 0 to 1; False where the request is not known (any more)."""
        if (tenant, request_id) not in self.routes:
            return False
        request, route = self.routes[tenant, request_id]
        self.chooser(self.settings.policy)
        for chooser in self.choosers.values():
            for replica in self.replicas:
                if replica.name == route:
                    chooser.learn(request, replica, quality)
        return True


class Batch:
    """Requests of class `batch` wait until a backend idles, enough of them are there, or their deadline comes.
    candidates: backends that could take a request now. `look`, called when a request comes or ends and after looks at
    backends, lets those go that have a reason, the oldest deadline first."""

    def __init__(self, candidates: Callable[[Request], list[Replica]]) -> None:
        self.candidates = candidates
        self.waiting: list[tuple[float, Request, asyncio.Future[str]]] = []  # with the deadline of each

    async def wait(self, request: Request) -> str:
        """Returns when the request may go, and says why: idle, enough or deadline."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        deadline = request.deadline or request.began + DEADLINE_SECONDS
        entry = (deadline, request, ready)
        self.waiting.append(entry)
        try:
            self.look()
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with the answer.
            async with asyncio.timeout(deadline - request.began):
                return await ready
        except TimeoutError:
            return "deadline"
        finally:
            if entry in self.waiting:
                self.waiting.remove(entry)

    def look(self) -> None:
        """Let go whatever has a reason to: one request for each backend that idles, or all when enough wait."""
        self.waiting = [one for one in self.waiting if not one[2].done()]
        if len(self.waiting) >= ENOUGH:
            for *_, ready in self.waiting:
                ready.set_result("enough")
            self.waiting = []
            return
        taken: set[str] = set()
        for _, request, ready in sorted(self.waiting, key=lambda one: one[0]):
            idle = [one for one in self.candidates(request) if not one.running() and one.name not in taken]
            if idle:
                taken.add(idle[0].name)
                ready.set_result("idle")


@dataclass
class Places:
    """Requests that wait for a place, fair by tenant. free: backends with room for a request. waiting: by tenant; the
    one served last is last. `look` lets one request go; it is called whenever a place may have become free."""

    free: Callable[[Request], object]
    waiting: dict[str, deque[tuple[Request, asyncio.Future[None]]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    async def wait(self, request: Request, seconds: float) -> bool:
        """Wait for a place, at most `seconds`. Returns whether there was one."""
        if not self.waiting and self.free(request):
            return True
        first = False
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._turn(request, first)
                    if self.free(request):
                        return True
                    first = True  # somebody was faster: it keeps its turn
        except TimeoutError:
            return False

    async def _turn(self, request: Request, first: bool) -> None:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = (request, ready)
        queue = self.waiting.setdefault(request.tenant, deque())
        queue.appendleft(entry) if first else queue.append(entry)
        try:
            if not first:
                self.look()
            await ready
        finally:
            if entry in queue:
                queue.remove(entry)
            if not queue:
                self.waiting.pop(request.tenant, None)

    def look(self) -> None:
        """Let the first request of the next tenant go that finds a place."""
        for tenant in list(self.waiting):
            queue = self.waiting[tenant]
            found = next((entry for entry in queue if not entry[1].done() and self.free(entry[0])), None)
            if found is not None:
                self.waiting[tenant] = self.waiting.pop(tenant)
                queue.remove(found)
                found[1].set_result(None)
                return
