"""One request, as a client sent it: read, checked, and what the client says about its way through the gateway."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway import packed
from selfspec_cli.gateway.errors import bad_request

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
NEEDED: dict[str, tuple[str, ...]] = {
    CHAT: ("messages",),
    COMPLETIONS: ("prompt", "prompt_embeds"),
    EMBEDDINGS: ("input",),
    RESPONSES: ("input", "prompt"),
    "/v1/rerank": ("query",),
    "/v2/rerank": ("query",),
    "/rerank": ("query",),
    "/v1/score": ("text_1", "queries", "query"),
}
"""Endpoints of models, and of each the fields of the body one of which has to be there."""
STREAMED = (CHAT, COMPLETIONS, RESPONSES)
CLASSES = ("interactive", "batch")
CACHE_WISHES = ("none", "exact")
OWN = "selfspec"  # of the body: what is meant for the gateway
OBJECTS = ("stream_options", "vllm_xargs")  # of the body: what the gateway adds something to
WISHES = ("policy", "cache", "deadline_ms", "class", "priority", "backend")
WISH_HEADER = "x-selfspec-"
LONGEST_WAIT = 86_400_000  # milliseconds: a day
LONGEST_ANSWER = 1 << 40  # tokens; any limit beyond is none
LONGEST_SESSION = 256  # characters of its name that count
BLOCK = 256  # characters of a prompt that are remembered as one piece
EXPECTED = 128  # tokens of an answer before any was seen


@dataclass
class Request:
    """A request. body: without what is meant for the gateway. prompt_tokens: an estimate from the characters, exact
    for token ids. blocks: hashes of the prompt's beginnings, BLOCK characters further each. expected_tokens: of the
    answer. session: what the client calls it, empty if it has none. deadline: monotonic seconds, of class batch. text:
    what was asked, for hashes and logs."""

    endpoint: str
    body: dict[str, Any]
    id: str = ""
    tenant: str = ""
    session: str = ""
    prompt_tokens: float = 0.0
    prompt_chars: int = 0
    blocks: tuple[int, ...] = ()
    expected_tokens: float = EXPECTED
    policy: str | None = None
    backend: str | None = None
    cache: str | None = None
    kind: str = "interactive"
    priority: int | None = None
    deadline: float | None = None
    began: float = field(default_factory=time.monotonic)
    text: str = ""

    @property
    def model(self) -> str:
        """As the client calls it."""
        return str(self.body.get("model") or "auto")

    @property
    def stream(self) -> bool:
        """Whether the answer is wanted in parts."""
        return bool(self.body.get("stream")) and self.endpoint in STREAMED

    @cached_property
    def answers(self) -> int:
        """Choices that the answer will have. Kept, because a prompt may be a hundred thousand token ids."""
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt) else 1
        return prompts * (self.body.get("n") or 1)

    @property
    def most_tokens(self) -> int | None:
        """Limit of the answer that the client set."""
        limit = self.body.get("max_output_tokens" if self.endpoint == RESPONSES else "max_completion_tokens")
        limit = self.body.get("max_tokens") if limit is None else limit
        return min(limit, LONGEST_ANSWER) if isinstance(limit, int) and limit > 0 else None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Those of a chat, as far as they are objects."""
        found = self.body.get("messages")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def only_text(self) -> bool:
        """Whether messages have no pictures or the like, of which token ids say only where they stood."""
        contents = [one.get("content") for one in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)

    @property
    def greedy(self) -> bool:
        """Whether the same request has the same answer everywhere."""
        return self.body.get("temperature") == 0


def read(endpoint: str, raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request out of its body and headers; raises GatewayError (400) for one that no backend could answer."""
    try:
        body = packed.loads(raw)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    if not isinstance(body.get("model", ""), str):
        raise bad_request(f"model={body['model']!r}: a name is needed", "model")
    if not isinstance(body.get("stream") or False, bool):
        raise bad_request(f"stream={body['stream']!r}: true or false is needed", "stream")
    several = body.get("n")
    if several is not None and (type(several) is not int or several < 1):
        raise bad_request(f"n={several!r}: a whole number from 1 on is needed", "n")
    for name in OBJECTS:
        if not isinstance(body.get(name) or {}, dict):
            raise bad_request(f"{name}={body[name]!r}: a JSON object is needed", name)
    needed = next((name for name in NEEDED[endpoint] if name in body), None)
    if needed is None:
        raise bad_request(f"{NEEDED[endpoint][0]} is missing", NEEDED[endpoint][0])
    own = body.pop(OWN, None) or {}
    session = str(headers.get("x-session-id") or body.get("user") or "")[:LONGEST_SESSION]
    request = Request(endpoint, body, id=headers.get("x-request-id", ""), session=session)
    _wishes(request, own, headers)
    try:
        _measure(request, body[needed])
    except ValueError as error:
        raise bad_request(f"the body cannot be handed on: {error}") from error
    return request


def request_id(given: str) -> str:
    """The id that a client gave, if it can be one; otherwise a new one."""
    fits = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if fits else f"gw-{uuid.uuid4().hex}"


def _wishes(request: Request, own: Any, headers: Mapping[str, str]) -> None:
    """What the client says by `selfspec` in the body, and by X-Selfspec-... headers, which win."""
    if not isinstance(own, dict):
        raise bad_request(f"{OWN}={own!r}: a JSON object is needed", OWN)
    wishes = dict(own)
    for header, text in headers.items():
        if header.startswith(WISH_HEADER):
            wishes[header.removeprefix(WISH_HEADER).replace("-", "_")] = text
    for name, value in wishes.items():
        if name not in WISHES:
            raise bad_request(closest(name, WISHES, "wish"), OWN)
        if value is None:  # as clients write what they do not say
            continue
        if name == "class":
            request.kind = _word(value, CLASSES, name)
        elif name == "cache":
            request.cache = _word(value, CACHE_WISHES, name)
        elif name == "priority":
            request.priority = _whole(value, name)
        elif name == "deadline_ms":
            request.deadline = request.began + _milliseconds(value, name) / 1000
        else:
            setattr(request, name, str(value))


def _word(value: Any, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise bad_request(closest(value, allowed, name), name)
    return str(value)


def _whole(value: Any, name: str) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise bad_request(f"{name}={value!r}: a whole number is needed", name) from error


def _milliseconds(value: Any, name: str) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = float("nan")
    if not 0 <= found <= LONGEST_WAIT:
        raise bad_request(f"{name}={value!r}: a number from 0 to {LONGEST_WAIT} is needed", name)
    return found


def _measure(request: Request, content: Any) -> None:
    """How long the prompt is, and hashes of its beginnings."""
    ids = content if request.endpoint == COMPLETIONS and isinstance(content, list) else []
    request.text = content if isinstance(content, str) else packed.dumps(content).decode()
    if ids and all(isinstance(one, int) for one in ids):
        request.prompt_tokens = float(len(ids))
    else:
        request.prompt_chars = len(request.text)
        request.prompt_tokens = request.prompt_chars / 4
    found, before = [], hash((request.endpoint, request.model))
    for place in range(0, min(len(request.text), 64 * BLOCK), BLOCK):
        before = hash((before, request.text[place : place + BLOCK]))
        found.append(before)
    request.blocks = tuple(found)
    _ = request.answers  # counted here, where a long prompt holds up nobody
