"""One request, as a client sent it: read, checked, and what the client says about its way through the gateway."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway import wire
from selfspec_cli.gateway.errors import bad_request, wrong_value

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
WISH_HEADER = "x-selfspec-"
LONGEST_WAIT = 86_400_000  # milliseconds: a day
LONGEST_ANSWER = 1 << 40  # tokens; any limit beyond is none
LONGEST_SESSION = 256  # characters of its name that count
BLOCK = 256  # characters of a prompt that are remembered as one piece
EXCERPT = 2000  # characters
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
        return str(self.body.get("model") or "auto")

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream")) and self.endpoint in STREAMED

    @cached_property
    def answers(self) -> int:
        """Choices that the answer will have. Kept, because a prompt may be a hundred thousand token ids."""
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt) else 1
        return prompts * (self.body.get("n") or 1)

    @property
    def most_tokens(self) -> int | None:
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
    def excerpt(self) -> str:
        """The ends of a long text: they say what it was about, and can be kept of thousands of requests."""
        return self.text if len(self.text) <= EXCERPT else self.text[: EXCERPT // 2] + self.text[-EXCERPT // 2 :]

    @property
    def greedy(self) -> bool:
        """Whether the same request has the same answer everywhere."""
        return self.body.get("temperature") == 0


class Fields(BaseModel):
    """What the gateway itself reads of a body; all else is the backend's matter."""

    model_config = ConfigDict(strict=True)

    model: str = ""
    stream: bool | None = None
    n: int | None = Field(None, ge=1)
    stream_options: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    selfspec: dict[str, Any] | None = None


class Wishes(BaseModel):
    """What a client says by `selfspec` in the body, and by X-Selfspec-... headers, which win."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    policy: str | None = None
    backend: str | None = None
    cache: Literal["none", "exact"] | None = None
    kind: Literal["interactive", "batch"] | None = Field(None, alias="class")
    deadline_ms: float | None = Field(None, ge=0, le=LONGEST_WAIT)
    priority: int | None = None


def read(endpoint: str, raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request out of its body and headers; raises GatewayError (400) for one that no backend could answer."""
    try:
        body = wire.loads(raw)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    try:
        Fields.model_validate(body)
        wishes = _wishes(body.pop("selfspec", None) or {}, headers)
    except ValidationError as error:
        raise wrong_value(error.errors()) from error
    needed = next((name for name in NEEDED[endpoint] if name in body), None)
    if needed is None:
        raise bad_request(f"{NEEDED[endpoint][0]} is missing", NEEDED[endpoint][0])
    said = wishes.model_dump(exclude={"deadline_ms"}, exclude_none=True)
    session = str(headers.get("x-session-id") or body.get("user") or "")[:LONGEST_SESSION]
    request = Request(endpoint, body, id=headers.get("x-request-id", ""), session=session, **said)
    if wishes.deadline_ms is not None:
        request.deadline = request.began + wishes.deadline_ms / 1000
    try:
        _measure(request, body[needed])
    except ValueError as error:
        raise bad_request(f"the body cannot be handed on: {error}") from error
    return request


def request_id(given: str) -> str:
    """The id that a client gave, if it can be one; otherwise a new one."""
    fits = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if fits else f"gw-{uuid.uuid4().hex}"


def _wishes(said: dict[str, Any], headers: Mapping[str, str]) -> Wishes:
    wishes = said | {
        header.removeprefix(WISH_HEADER).replace("-", "_"): text
        for header, text in headers.items()
        if header.startswith(WISH_HEADER)
    }
    allowed = [field.alias or name for name, field in Wishes.model_fields.items()]
    for name in wishes:
        if name not in allowed:
            raise bad_request(closest(name, allowed, "wish"), "selfspec")
    return Wishes.model_validate(wishes)


def _measure(request: Request, content: Any) -> None:
    """How long the prompt is, and hashes of its beginnings."""
    ids = content if request.endpoint == COMPLETIONS and isinstance(content, list) else []
    request.text = content if isinstance(content, str) else wire.dumps(content).decode()
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
