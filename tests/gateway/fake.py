"""Backends without a model, inside the test's event loop. They answer as vLLM does, and fail when a test wants it.

The next token is a function of all tokens before it, so an answer that is continued from its token ids is the very same
answer, and one that was cut into tokens anew is not: text is cut by letters, but a generated token has several.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = [f"w{number} " for number in range(997)]
LETTERS = 1000  # ids from here on are letters of prompts
OTHERS = {
    "/v1/embeddings": {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    "/v1/rerank": {"id": "r", "results": [{"index": 0, "relevance_score": 0.5}]},
}


def encode(text: str) -> list[int]:
    return [LETTERS + ord(letter) for letter in text]


def following(ids: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:4], "big") % len(WORDS)


def generated(ids: list[int], count: int) -> list[int]:
    found = list(ids)
    for _ in range(count):
        found.append(following(found))
    return found[len(ids) :]


def text_of(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def answer(prompt: str, count: int) -> str:
    """What every healthy backend answers."""
    return text_of(generated(encode(prompt), count))


def warms(body: dict[str, Any]) -> bool:
    """Whether the gateway asks, to warm a backend up: that is not counted, and meets no fault and no delay."""
    return str(body.get("prompt")).replace(" ", "").isdigit()


@dataclass
class Fake:
    """A backend.

    die_after, hang_after and garbage_after count the tokens of a stream after which a fault happens: the connection is
    closed; nothing more is sent (only comments if it `pings`); `garbage` is sent and the stream ends. times: how many
    requests meet the fault before the backend is healthy. form: of an event with these data. script: what streams send
    in place of tokens. refuse: status of every answer, with `error` and, if set, Retry-After; of prompts with the word
    poison it is 500. go: what answers in one piece wait for. adapters: more models. suffix: of its address.
    whole_garbage: what it answers where no stream is asked for. unsure: logprob of its tokens for prompts with the word
    hard. dead: closes every connection at once. step: seconds between two tokens; first: before the first.
    """

    name: str = "fake"
    model: str = "toy"
    step: float = 0.0
    first: float = 0.0
    die_after: int | None = None
    hang_after: int | None = None
    garbage_after: int | None = None
    garbage: bytes = b"<html>502 Bad Gateway</html>\n\n"
    pings: bool = False
    form: Callable[[bytes], bytes] = lambda data: b"data: " + data + b"\n\n"
    script: Sequence[bytes] = ()
    times: int = 10**9
    refuse: int | None = None
    error: dict[str, Any] = field(default_factory=lambda: {"message": "refused here", "type": "x"})
    retry_after: str | None = None
    go: asyncio.Event | None = None
    adapters: tuple[str, ...] = ()
    suffix: str = ""
    whole_garbage: bytes | None = None
    unsure: float = -0.01
    dead: bool = False
    metrics: str = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    url: str = ""
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.tell)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/{path:.*}", self.complete)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}{self.suffix}"

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def tell(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": one} for one in (self.model, *self.adapters)]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not warms(body):
            self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.dead:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status = 500 if "poison" in str(body.get("prompt")) else self.refuse
        if status is not None:
            headers = {"Retry-After": self.retry_after} if self.retry_after else None
            return web.json_response({"error": self.error}, status=status, headers=headers)
        if request.path in OTHERS:
            return web.json_response(OTHERS[request.path])
        self.running += 1
        try:
            return await (self.stream if body.get("stream") else self.whole)(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def plan(self, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt = body.get("prompt") or "".join(one["content"] for one in body["messages"])
        ids = list(prompt) if isinstance(prompt, list) else encode(prompt)
        return ids, generated(ids, body.get("max_tokens") or body.get("max_completion_tokens") or 20)

    async def whole(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.whole_garbage is not None and self.times > 0:
            self.times -= 1
            return web.Response(body=self.whole_garbage)
        if self.go is not None:
            await self.go.wait()
        ids, tokens = self.plan(body)
        await asyncio.sleep(self.first + self.step * len(tokens))
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        inner = {"text": text_of(tokens)} if "prompt" in body else {"message": {"content": text_of(tokens)}}
        choice = {"index": 0, "finish_reason": "length", "logprobs": None, **inner}
        if body.get("logprobs"):
            prompt = str(body.get("prompt") or body["messages"])
            logs = [self.unsure if "hard" in prompt else -0.01 for _ in tokens]
            chat = {"content": [{"token": "x", "logprob": one} for one in logs]}
            choice["logprobs"] = {"token_logprobs": logs} if "prompt" in body else chat
        return web.json_response({"id": "x", "model": self.model, "choices": [choice], "usage": usage})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        fine = warms(body)
        broken = self.times > 0 and not fine
        self.times -= broken
        head, events, end = ([], self.script, []) if self.script and not fine else self.events(body)
        await asyncio.sleep(self.first)
        await response.write(b"".join(head))
        for place, event in enumerate(events):
            if broken and await self.fails(request, response, place):
                return response
            await response.write(event)
            if self.step and not fine:
                await asyncio.sleep(self.step)
        if not (broken and await self.fails(request, response, len(events))):
            await response.write(b"".join(end))
        return response

    async def fails(self, request: web.Request, response: web.StreamResponse, place: int) -> bool:
        if place == self.die_after:
            assert request.transport is not None
            request.transport.abort()
        elif place == self.hang_after:
            while True:
                await response.write(b": ping\n\n" if self.pings else b"")
                await asyncio.sleep(0.05)
        elif place == self.garbage_after:
            await response.write(self.garbage)
        return place in (self.die_after, self.garbage_after)

    def events(self, body: dict[str, Any]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """(the head of a chat, an event for each token, usage if it is wanted and the end)."""
        ids, tokens = self.plan(body)
        chat, wanted = "messages" in body, bool(body.get("return_token_ids"))

        def event(choice: dict[str, Any], **more: Any) -> bytes:
            whole = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
            kind = "chat.completion.chunk" if chat else "text_completion"
            named = {"id": f"cmpl-{self.name}", "object": kind, "created": 1, "model": self.model}
            return self.form(json.dumps(named | {"choices": [whole], **more}).encode())

        head, made, end = [], [], [self.form(b"[DONE]")]
        if chat:
            prompt = ids if wanted else None
            head = [event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=prompt)]
        for place, token in enumerate(tokens):
            choice = {"delta": {"content": WORDS[token]}} if chat else {"text": WORDS[token]}
            choice |= {"token_ids": [token] if wanted else None}
            if not chat:
                choice["prompt_token_ids"] = ids if wanted and not place else None
            made.append(event(choice | {"finish_reason": "length" if place + 1 == len(tokens) else None}))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            end.insert(0, self.form(json.dumps({"id": "x", "choices": [], "usage": usage}).encode()))
        return head, made, end
