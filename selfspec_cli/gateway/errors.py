"""Errors in OpenAI's form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway import packed


@dataclass(eq=False)
class GatewayError(Exception):
    """What a client is answered instead of an answer.

    status: of HTTP. code: of the error, such as context_length_exceeded; None takes the status. headers: as well as the
    usual ones. logged: what the log says, if the message may hold text of a prompt; None logs the message.
    """

    message: str
    status: int
    kind: str
    param: str | None = None
    code: Any = None
    backend: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    logged: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.code = self.status if self.code is None else self.code
        self.logged = self.message if self.logged is None else self.logged

    def body(self) -> bytes:
        """The JSON that the client gets."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.backend is not None:
            error["backend"] = self.backend
        return packed.dumps({"error": error})


def invalid(message: str, status: int, **more: Any) -> GatewayError:
    """The client's mistake."""
    return GatewayError(message, status, "invalid_request_error", **more)


def bad_request(message: str, param: str | None = None) -> GatewayError:
    """A mistake in a request. Its values may be quoted to the client, and are not logged."""
    return invalid(message, 400, param=param, logged=f"invalid request: {param or 'body'}")


def unavailable(message: str, seconds: float = 1.0, **more: Any) -> GatewayError:
    """HTTP 503, to be tried again after so many seconds."""
    headers = {"retry-after": str(max(1, round(seconds)))}
    return GatewayError(message, 503, "service_unavailable", headers=headers, **more)


def of_backend(status: int, raw: bytes, backend: str) -> GatewayError:
    """A backend's refusal of the request itself, whatever form it had there."""
    try:
        found = packed.loads(raw)
    except ValueError:
        found = raw.decode(errors="replace").strip()[:500]
    inner = found.get("error", found) if isinstance(found, dict) else found
    logged = f"HTTP {status} of the backend"
    if not isinstance(inner, dict):
        return GatewayError(str(inner or f"HTTP {status}"), status, "backend_error", backend=backend, logged=logged)
    message = inner.get("message") or inner.get("detail") or str(inner)
    kind, param, code = str(inner.get("type") or "backend_error"), inner.get("param"), inner.get("code")
    return GatewayError(str(message), status, kind, param, code, backend, logged=logged)
