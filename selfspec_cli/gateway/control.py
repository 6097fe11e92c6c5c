"""The control surface, by FastAPI: models, health, metrics, routes, feedback, drain, the settings."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from selfspec_cli import __version__
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway.cache import AnswerCache
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.wire import GatewayError, bad_request, invalid

MOST_SAID = 200  # characters of a wrong value
LOOK = ["GET", "HEAD"]
GAINS_SECONDS = 60.0  # between two times that the ledger's intervals are worked out for /metrics


class Feedback(BaseModel):
    """How an answer was, 0 (wrong) to 1 (right), by its x-request-id or by the entry in a hit's x-selfspec-cache."""

    request_id: str | None = None
    entry: str | None = None
    quality: float = Field(ge=0, le=1)


def control(gateway: Gateway) -> FastAPI:
    """The application for everything that is no answer of a model. Who asks is in `scope["tenant"]` (`server`)."""
    app = FastAPI(title="selfspec gateway", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guarded(request: Request, call_next: Any) -> Any:
        try:
            return await call_next(request)
        except Exception as error:  # a fault of ours is this request's alone
            return _answer(gateway.fault(error))

    _errors(app)
    _views(app, gateway)
    _admin_views(app, gateway)
    _actions(app, gateway)
    return app


def _answer(error: GatewayError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's form, as for the endpoints of models."""

    @app.exception_handler(GatewayError)
    async def refused(request: Request, error: GatewayError) -> Response:
        return _answer(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        """FastAPI's own: a path that there is not, or a method that it does not take."""
        where, headers = f"{request.method} {request.url.path}", dict(error.headers or {})
        allowed = f"; allowed: {headers['Allow']}" if "Allow" in headers else ""
        message = {404: f"there is no {where} here", 405: f"{where}: the method is not allowed here{allowed}"}
        said = message.get(error.status_code, f"{where}: {error.detail}")
        return _answer(invalid(said, error.status_code, headers=headers))

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> Response:
        """A body that is not what is needed; the first problem of it."""
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _answer(bad_request(f"the body is not JSON: {first['ctx']['error']}"))
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        given = "" if first["type"] == "missing" else f"={first['input']!r:.{MOST_SAID}}"
        return _answer(bad_request(f"{name or 'body'}{given}: {first['msg']}", name or None))


def _views(app: FastAPI, gateway: Gateway) -> None:
    """What every key may look at."""
    gains_at = [0.0]  # when /metrics last got the gains

    @app.api_route("/health", methods=LOOK)
    async def health() -> Response:
        """200 while a backend takes requests and the gateway does not end. One that is full is no fault: whoever asks
        would end a gateway in the middle of its requests."""
        up = [one.name for one in gateway.replicas if one.up()]
        fine = bool(up) and not gateway.draining
        return JSONResponse({"status": "ok" if fine else "unavailable", "backends": up}, 200 if fine else 503)

    @app.api_route("/metrics", methods=LOOK)
    async def metrics() -> Response:
        if time.monotonic() - gains_at[0] > GAINS_SECONDS:
            gains_at[0] = time.monotonic()
            gateway.telemetry.gains(await asyncio.to_thread(gateway.ledger.gains))
        gateway.looked()
        return Response(gateway.telemetry.text(), media_type="text/plain; version=0.0.4")

    @app.api_route("/v1/models", methods=LOOK)
    async def models(request: Request) -> dict[str, Any]:
        names = gateway.routing.models()
        allowed = request.scope["tenant"].models or names
        return {"object": "list", "data": [_model(name) for name in names if name in allowed]}

    @app.api_route("/v1/models/{name:path}", methods=LOOK)
    async def model(name: str, request: Request) -> dict[str, Any]:
        known = [one["id"] for one in (await models(request))["data"]]
        if name not in known:
            raise invalid(closest(name, known or ("none yet",), "model"), 404, param="model", code="model_not_found")
        return _model(name)


def _admin_views(app: FastAPI, gateway: Gateway) -> None:
    """What an admin looks at."""

    @app.get("/gateway/routes")
    async def routes() -> dict[str, Any]:
        """Backends as they are, and what each route won."""
        gains = await asyncio.to_thread(gateway.ledger.gains)  # intervals are resampled, which takes its time
        gateway.telemetry.gains(gains)
        return {
            "policy": gateway.settings.policy,
            "policies": {name: one.help for name, one in POLICIES.items()},
            "backends": [_shown(one) for one in gateway.replicas],
            "gains": [vars(gain) for gain in gains],
            "cache": await gateway.caching.call(cache.size) if (cache := gateway.caching.cache) else None,
        }

    @app.get("/gateway/config")
    async def config() -> Any:
        """The settings, which hold no keys; of a server's environment, where a value may be a token, the names."""
        settings = asdict(gateway.settings)
        for backend in settings["backends"]:
            backend["environment"] = sorted(backend["environment"])
        return settings


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": "selfspec"}


def _actions(app: FastAPI, gateway: Gateway) -> None:
    def cache() -> AnswerCache:
        if gateway.caching.cache is None:
            raise invalid("no cache is configured: cache.mib=1024", 404)
        return gateway.caching.cache

    @app.post("/gateway/feedback")
    async def feedback(given: Feedback, request: Request) -> dict[str, Any]:
        """An answer was judged by who got it: the policy `quality` learns, and the cache forgets a wrong one."""
        tenant = request.scope["tenant"].name
        if given.entry is not None:
            forget = cache().evict if given.quality < 0.5 else cache().has
            return _entry(given.entry, await gateway.caching.call(forget, given.entry, tenant))
        if given.request_id is None:
            raise bad_request("request_id or entry is missing: an answer's x-request-id, or x-selfspec-cache of a hit")
        if gateway.settings.workers > 1:
            raise bad_request("request_id: with several workers only entries of the cache are judged", "request_id")
        if not gateway.routing.judged(tenant, given.request_id, given.quality):
            raise invalid(f"request {given.request_id!r} is not known (any more)", 404)
        return {"request_id": given.request_id}

    @app.delete("/gateway/cache/{entry}")
    async def evict(entry: str) -> dict[str, Any]:
        return _entry(entry, await gateway.caching.call(cache().evict, entry, None))

    @app.post("/gateway/backends/{name}/{what}")
    async def drain(name: str, what: str) -> dict[str, Any]:
        """what: drain (no new requests; those in flight end) or resume."""
        found = {one.name: one for one in gateway.replicas}
        for noun, word, allowed in (("backend", name, found), ("action", what, ("drain", "resume"))):
            if word not in allowed:
                raise invalid(closest(word, allowed, noun), 404)
        found[name].draining = what == "drain"
        gateway.tell(name, what == "drain")
        return _shown(found[name])


def _entry(name: str, known: bool) -> dict[str, Any]:
    """The answer about an entry of the cache; raises GatewayError (404) where there is none by that name."""
    if not known:
        raise invalid(f"entry {name[:MOST_SAID]!r} is not in the cache (any more)", 404)
    return {"entry": name}


def _shown(one: Any) -> dict[str, Any]:
    step = one.timing.steps.value(1)
    return {
        "name": one.name,
        "kind": one.settings.kind,
        "url": one.url,
        "state": one.state.value,
        "takes_requests": one.sound() and one.has_room(),
        "draining": one.draining,
        "models": list(one.models),
        "in_flight": len(one.flights),
        "running": one.load.running if one.load.known else None,
        "open": one.breaker.open_until > 0,
        "backoff_seconds": one.backoff(),
        "round_work": one.load.work if one.load.known else None,
        "round_tokens": one.load.tokens if one.load.known else None,
        "expected_tpot_ms_alone": None if step is None else 1000 * step * one.load.work / one.load.tokens,
    }
