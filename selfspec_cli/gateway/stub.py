"""A third address for the demo: a server in OpenAI's form that has no model, and says so in every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

MODEL = "stub-without-a-model"
WORDS = ("this ", "is ", "a ", "stub: ", "no ", "model ", "answered ")
STEP_SECONDS = 0.02


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _complete(request: web.Request) -> web.StreamResponse:
    body = orjson.loads(await request.read())
    count = min(int(body.get("max_tokens") or 16), 64)
    words = [WORDS[place % len(WORDS)] for place in range(count)]
    usage = {"prompt_tokens": len(str(body.get("prompt", ""))) // 4, "completion_tokens": count}
    head = {"id": "stub", "object": "text_completion", "created": 0, "model": MODEL}
    if not body.get("stream"):
        await asyncio.sleep(STEP_SECONDS * count)
        choice = {"index": 0, "text": "".join(words), "finish_reason": "length"}
        return web.json_response({**head, "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for place, word in enumerate(words):
        await asyncio.sleep(STEP_SECONDS)
        choice = {"index": 0, "text": word, "finish_reason": "length" if place + 1 == count else None}
        await response.write(b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\n")
    await response.write(b"data: " + orjson.dumps({**head, "choices": [], "usage": usage}) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def stub() -> AsyncIterator[str]:
    """Its address, for as long as the block lasts."""
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/completions", _complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
