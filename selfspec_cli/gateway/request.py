"""One request: what a client sent and wishes, what became of it, and the log with a row of each."""

import hashlib
import os
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway.timing import Prediction
from selfspec_cli.gateway.wire import bad_request, dumps, loads

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
OWN = "selfspec"  # of the body: what is meant for the gateway
OBJECTS = ("stream_options", "vllm_xargs")  # of the body: what the gateway adds something to
WISHES: dict[str, tuple[str, ...]] = {
    "policy": (),
    "cache": ("none", "exact"),
    "deadline_ms": (),
    "class": ("interactive", "batch"),
    "priority": (),
    "backend": (),
}
"""What a client may wish, and the words for it; any text or number where there are none."""
WISH_HEADER = "x-selfspec-"
LONGEST_WAIT = 86_400_000  # milliseconds: a day
LONGEST_ANSWER = 1 << 40  # tokens; any limit beyond is none
LONGEST_SESSION = 256  # characters of its name that count
BLOCK = 256  # characters of a prompt that are remembered as one piece
EXPECTED = 128  # tokens of an answer before any was seen
TIMES = ("waited", "ttft", "tpot", "e2e", "expected_ttft", "expected_tpot", "lost")  # of an outcome, in seconds
MOST = 1 << 50  # tokens of one request; a backend that says more is wrong
FILE = "requests.jsonl"  # the log


@dataclass
class Request:
    """A request. body: without what is meant for the gateway. prompt_tokens: estimated from the characters, exact for
    token ids. blocks: hashes of the prompt's beginnings, BLOCK characters further each. expected_tokens: of the answer.
    session: the client's name of it, or empty. deadline: monotonic seconds, of class batch. text: what was asked."""

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
    def greedy(self) -> bool:
        """Whether the same request has the same answer everywhere."""
        return self.body.get("temperature") == 0


def read(endpoint: str, raw: bytes, headers: Mapping[str, str]) -> Request:
    """A request out of its body and headers; raises GatewayError (400) for one that no backend could answer."""
    try:
        body = loads(raw)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    several = body.get("n")
    for name, fits, kind in (
        ("model", isinstance(body.get("model", ""), str), "a name"),
        ("stream", isinstance(body.get("stream") or False, bool), "true or false"),
        ("n", several is None or (type(several) is int and several > 0), "a whole number from 1 on"),
        *((name, isinstance(body.get(name) or {}, dict), "a JSON object") for name in OBJECTS),
    ):
        if not fits:
            raise bad_request(f"{name}={body[name]!r}: {kind} is needed", name)
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
        if (allowed := WISHES[name]) and value not in allowed:
            raise bad_request(closest(value, allowed, name), name)
        if name == "priority":
            request.priority = _whole(value, name)
        elif name == "deadline_ms":
            request.deadline = request.began + _milliseconds(value, name) / 1000
        else:
            setattr(request, "kind" if name == "class" else name, str(value))


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
    request.text = content if isinstance(content, str) else dumps(content).decode()
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


@dataclass
class Outcome:
    """What became of a request: a row of the log, and what is counted. Times in seconds; None: not measured. route:
    backend, or `cache`. reason: why it was chosen. plain: it is one of the ledger's baseline. lost: seconds between the
    last token before a backend died and the first one after it. machine_s: its share of the machine's time. tried:
    backends that failed."""

    request: Request
    policy: str = ""
    reason: str = ""
    route: str | None = None
    plain: bool = False
    cache: str = "off"
    status: int = 0
    error: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    cached_tokens: int | None = None
    expected_ttft: float | None = None
    expected_tpot: float | None = None
    waited: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    cost: float | None = None
    machine_s: float | None = None
    survived: int = 0
    lost: float | None = None
    tried: list[str] = field(default_factory=list)

    def expect(self, found: Prediction | None) -> None:
        """Take the times that are predicted from now on; what has passed is part of the time to first token."""
        passed = time.monotonic() - self.request.began
        self.expected_ttft, self.expected_tpot = (None, None) if found is None else (passed + found.ttft, found.tpot)

    def usage(self, found: Any) -> None:
        if isinstance(found, dict):
            self.prompt_tokens = _count(found.get("prompt_tokens"), self.prompt_tokens)
            self.tokens = _count(found.get("completion_tokens"), self.tokens)
            details = found.get("prompt_tokens_details")
            self.cached_tokens = _count(details.get("cached_tokens"), None) if isinstance(details, dict) else None

    def row(self, text: bool) -> dict[str, Any]:
        """A row of the log. text: what was asked is in it; otherwise its SHA-256."""
        request = self.request
        prompt, messages = request.body.get("prompt"), request.body.get("messages")
        said = {"messages": messages} if messages else {"prompt": prompt if isinstance(prompt, str) else None}
        asked = {name: getattr(request, name) for name in ("id", "tenant", "endpoint", "model", "stream")}
        became = {name: value for name, value in vars(self).items() if name not in ("request", *TIMES)}
        times = {name: getattr(self, name) for name in TIMES}
        return {
            "at": time.time(),
            **asked,
            "class": request.kind,
            **became,
            **{f"{name}_ms": None if value is None else round(value * 1000, 3) for name, value in times.items()},
            "sha256": hashlib.sha256(request.text.encode()).hexdigest(),
            **(said if text else {"prompt": None}),
        }


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < MOST else otherwise


class RequestLog:
    """One JSON object a line, written by a thread, so that no token waits for a disk. text: what was asked is in it."""

    def __init__(self, file: Path, text: bool = False) -> None:
        self.file, self.text = file, text
        self._thread = ThreadPoolExecutor(1, "log")
        self._fails = False
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self._thread.submit(self._append, dumps(row) + b"\n")

    def fault(self, error: BaseException) -> None:
        """An error of the gateway's own, for whoever runs it."""
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def write(self) -> None:
        """Wait until every row is in the file."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _append(self, line: bytes) -> None:
        """In one write: lines of several processes do not mix."""
        try:
            with open(self.file, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                file.write(line)
            self._fails = False
        except OSError as error:  # a full disk ends the log, not the gateway
            if not self._fails:
                self.fault(error)
            self._fails = True
