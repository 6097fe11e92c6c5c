"""Which backends a request can go to, who chooses among them, and what is learnt from its answer."""

from __future__ import annotations

from collections.abc import Sequence

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
TEXT_KEPT = 2000  # characters of each


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
        """The order in which these backends are tried for a request."""
        return self.chooser(request.policy or self.settings.policy).choose(request, replicas)

    def check_model(self, request: Request) -> None:
        """Raises GatewayError (404, 503, 400) for a model or a backend that is not known."""
        if not any(replica.takes(request.model) for replica in self.replicas):
            known = dict.fromkeys(
                name for replica in self.replicas for name in (*replica.models, *replica.settings.serves)
            )
            problem = closest(request.model, known or ("none yet",), "model")
            if missing := [replica.name for replica in self.replicas if not replica.models]:
                raise unavailable(
                    f"{problem}; not up yet: {', '.join(missing)}", param="model", logged="no such model yet"
                )
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
        found = self.routes.get((tenant, request_id))
        if found is None:
            return False
        request, route = found
        self.chooser(self.settings.policy)
        for chooser in self.choosers.values():
            for replica in self.replicas:
                if replica.name == route:
                    chooser.learn(request, replica, quality)
        return True
