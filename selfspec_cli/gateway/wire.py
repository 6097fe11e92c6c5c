"""What goes over the wire: JSON, errors in OpenAI's form, and server-sent events (WHATWG HTML, section 9.2)."""

from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
LARGEST = 1 << 22  # bytes of one event
END_OF_STREAM = b"data: [DONE]\n\n"


def loads(raw: bytes) -> Any:
    """The value of a JSON document. Raises ValueError, also for deep nesting, NaN, and what is no Unicode."""
    return from_json(raw, allow_inf_nan=False)


def dumps(value: Any) -> bytes:
    """A value as JSON; raises ValueError where it is nested too deeply."""
    return to_json(value, inf_nan_mode="null")


@dataclass(eq=False)
class GatewayError(Exception):
    """What a client is answered instead of an answer. status: of HTTP. code: of the error; None takes the status.
    headers: besides the usual ones. logged: what the log says, if the message may quote a prompt; None logs the
    message."""

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
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.backend is not None:
            error["backend"] = self.backend
        return dumps({"error": error})


def invalid(message: str, status: int, **more: Any) -> GatewayError:
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
        found = loads(raw)
    except ValueError:
        found = raw.decode(errors="replace").strip()[:500]
    inner = found.get("error", found) if isinstance(found, dict) else found
    logged = f"HTTP {status} of the backend"
    if not isinstance(inner, dict):
        return GatewayError(str(inner or f"HTTP {status}"), status, "backend_error", backend=backend, logged=logged)
    message = inner.get("message") or inner.get("detail") or str(inner)
    kind, param, code = str(inner.get("type") or "backend_error"), inner.get("param"), inner.get("code")
    return GatewayError(str(message), status, kind, param, code, backend, logged=logged)


class BrokenStream(Exception):
    """A stream that ended early, stalled, or holds what is no event of an answer; the text says which."""


@dataclass(frozen=True)
class Event:
    """One event. data: its lines joined by line feeds. name: of its `event` field, empty if it has none."""

    data: bytes
    name: str = ""


class Parser:
    """Cuts bytes into events. Lines end in CR, LF or both; comments, `id` and `retry` are read and left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._begun = False

    def feed(self, part: bytes) -> list[Event]:
        """The events that are complete now; raises BrokenStream for one of more than LARGEST bytes."""
        if self._after_cr and part:
            part = part.removeprefix(b"\n")  # the second half of a line end that was cut in two
            self._after_cr = False
        if b"\r" in part:
            self._after_cr = part.endswith(b"\r")
            part = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._rest + part if self._rest else part
        if not self._begun:
            if len(text) < len(BOM) and BOM.startswith(text):
                self._rest = text
                return []
            self._begun, text = True, text.removeprefix(BOM)
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > LARGEST:
            raise BrokenStream("an event of more than 4 MiB")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return Event(block[6:])
    data, name = [], ""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return Event(b"\n".join(data), name) if data else None


def written(data: bytes, name: str = "") -> bytes:
    """An event as bytes. data: JSON, in which a line feed can only stand between tokens."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data.replace(b"\n", b" ") + b"\n\n"


def read(event: Event) -> dict[str, Any]:
    """The JSON object of an event; raises BrokenStream for an error, in any of the forms that servers use."""
    try:
        document = loads(event.data)
    except ValueError as error:
        raise BrokenStream("an event that is no JSON") from error
    if not isinstance(document, dict):
        raise BrokenStream("an event that is no JSON object")
    failed = document.get("type") in ("error", "response.failed")
    if event.name == "error" or failed or document.get("error") or document.get("object") == "error":
        raise BrokenStream("the backend sent an error in its stream")
    return document
