"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

import orjson


class GatewayError(Exception):
    """What a client is answered instead of an answer. status: of HTTP. headers: besides the usual ones."""

    def __init__(
        self,
        message: str,
        status: int,
        kind: str,
        *,
        param: str | None = None,
        backend: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.backend = message, status, kind, param, backend
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON that the client gets."""
        return document(self.message, self.kind, self.status, self.param, self.backend)


def document(message: str, kind: str, status: int, param: str | None = None, backend: str | None = None) -> bytes:
    """An error in OpenAI's form. backend: which one it came from; None for the gateway itself."""
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    if backend is not None:
        error["backend"] = backend
    return orjson.dumps({"error": error})


def bad_request(message: str, param: str | None = None) -> GatewayError:
    """The client's mistake."""
    return GatewayError(message, 400, "invalid_request_error", param=param)


def of_backend(status: int, raw: bytes, backend: str) -> bytes:
    """What a backend refused with, in OpenAI's form and with the backend's name, whatever form it had there."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = raw.decode(errors="replace").strip()[:500]
    inner = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(inner, dict):
        message = inner.get("message") or inner.get("detail") or str(inner)
        return document(str(message), str(inner.get("type") or "backend_error"), status, inner.get("param"), backend)
    return document(str(inner) or f"HTTP {status}", "backend_error", status, None, backend)
