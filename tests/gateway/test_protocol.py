"""Statuses, errors, endpoints and streams of every kind at the client."""

import asyncio
import json

import pytest
from aiohttp import web
from fake import Fake, answer
from running import PROMPT, WANTED, running

from selfspec_cli.gateway import upstream
from selfspec_cli.gateway.settings import CacheSettings


@pytest.mark.parametrize("status", [201, 204, 206, 301, 304, 307, 401, 403, 408, 429, 500, 503])
async def test_a_status_that_is_no_answer_is_asked_of_the_next_and_handed_on_by_few(tmp_path, status):
    async with running([Fake("a", refuse=status), Fake("b")], tmp_path) as on:
        assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "b"
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        got, found, headers = await on.post(PROMPT)
        assert (got, "location" in headers) == (status if status in (429, 500, 503) else 502, False)
        assert found["error"]["backend"] == "a"


NO_ANSWERS = [b"<html>", b"", b"[1, 2]", b'{"error": "x"}', b"null", b"{}"]
NO_ANSWERS += [b'{"choices": null}', b'{"choices": []}', b'{"choices": [null]}']


@pytest.mark.parametrize("raw", NO_ANSWERS)
async def test_what_is_no_answer_is_asked_of_the_next(tmp_path, raw):
    async with running([Fake("a", whole_garbage=raw), Fake("b")], tmp_path) as on:
        assert (await on.post(PROMPT))[1]["choices"][0]["text"] == WANTED
        on.gateway.replicas[1].draining = True
        assert (await on.post(PROMPT))[0] == 502


class Endless(Fake):
    """Sends blanks without end where an answer in one piece is asked for, and at /metrics if `looks`."""

    looks = False

    async def whole(self, request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async def tell(self, request):
        return await (self.whole(request, {}) if self.looks else super().tell(request))


async def test_an_answer_without_an_end_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(upstream, "ANSWER_BYTES", 1 << 20)
    async with running([Endless("a"), Fake("b")], tmp_path) as on:
        assert (await on.post(PROMPT))[1]["choices"][0]["text"] == WANTED
        on.gateway.replicas[1].draining = on.fakes["a"].looks = True
        assert (await on.post(PROMPT))[0] == 502
        with pytest.raises(upstream.BackendFailed, match="more than 1 MiB"):
            await on.gateway.upstream.get(on.fakes["a"].url + "/metrics", 60, {})


async def test_codes_stay_and_a_providers_401_is_the_gateways_own(tmp_path):
    error = {"message": "too long: SECRET", "type": "invalid_request_error", "code": "context_length_exceeded"}
    async with running([Fake("a", refuse=400, error=error)], tmp_path, kinds={"a": "openai"}) as on:
        status, found, _ = await on.post(PROMPT)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        on.fakes["a"].refuse = 401
        status, found, headers = await on.post(PROMPT)
        assert (status, "SECRET" in str(found), "www-authenticate" in headers) == (502, False, False)
        assert not any("SECRET" in str(row) for row in await on.rows())


async def test_looks_at_models_methods_and_ids(tmp_path):
    async with running([Fake("a")], tmp_path, origins=["https://app.example"]) as on:
        assert json.loads((await on.get("/v1/models/toy"))[1])["id"] == "toy"
        assert (await on.get("/v1/models/tyo"))[0] == 404
        for path in ("/health", "/v1/models", "/metrics"):
            async with on.session.head(on.url + path) as response:
                assert (response.status, await response.read()) == (200, b"")
        async with on.session.get(on.url + "/v1/completions") as response:
            assert (response.status, response.headers["allow"]) == (405, "POST")
        for path in ("/v1/nothing", "/v1/completions", "/health"):
            async with on.session.get(on.url + path, headers={"X-Request-Id": "mine"}) as response:
                assert response.headers["x-request-id"] == "mine"
        assert (await on.post(PROMPT, **{"X-Request-Id": "x" * 200}))[2]["x-request-id"].startswith("gw-")
        page = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        async with on.session.options(on.url + "/v1/completions", headers=page) as response:
            assert response.headers["access-control-allow-origin"] == "https://app.example"
        async with on.session.options(on.url + "/v1/completions", headers=page | {"Origin": "https://x"}) as response:
            assert "access-control-allow-origin" not in response.headers


async def test_wishes_of_null_and_limits_of_any_size_are_none(tmp_path):
    more = {"selfspec": {"backend": None, "policy": None}, "ignore_eos": True, "policy": None, "n": None}
    async with running([Fake("a")], tmp_path, policy="least_time") as on:
        assert (await on.post(json.dumps(PROMPT | more).encode()))[0] == 200
        on.fakes["a"].refuse = 400
        for wrong in ({"max_tokens": 10**400}, {"n": 10**400}, {"messages": 5}):
            path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
            status, body, _ = await on.post(json.dumps(PROMPT | more | wrong).encode(), path)
            assert (status, body["error"]["backend"]) == (400, "a")  # a backend's matter


async def test_a_client_that_offers_http2_is_answered_by_http1(tmp_path):
    body = json.dumps(PROMPT).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    )
    async with running([Fake("a")], tmp_path) as on:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(on.url.rsplit(":", 1)[1]))
        writer.write(head + b"HTTP2-Settings: AAMAAABk\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


SAID = (("reasoning", "let me "), ("reasoning", "think. "), ("content", "so "), ("content", "be it"))


def chat(name, said=SAID, **fault):
    """A backend that streams a chat of named kinds of text."""
    deltas = [{"role": "assistant", "content": ""}, *({field: text} for field, text in said)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = "stop"
    events = [json.dumps({"id": name, "choices": [choice]}).encode() for choice in choices]
    script = [b"data: " + data + b"\n\n" for data in (*events, b"[DONE]")]
    return Fake(name, step=0.01, script=script, **fault)


CHAT = {"model": "toy", "messages": [{"role": "user", "content": "once"}], "temperature": 0}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
async def test_a_chat_with_reasoning_survives(tmp_path, at):
    async with running([chat("a", die_after=at, times=1), chat("b")], tmp_path) as on:
        stream = await on.stream(CHAT, "/v1/chat/completions")
        deltas = [event["choices"][0]["delta"] for event in stream.events]
        texts = {name: "".join(one.get(name) or "" for one in deltas) for name in ("reasoning", "content")}
        assert texts == {"reasoning": "let me think. ", "content": "so be it"}
        assert (await on.rows())[0]["survived"] == 1


CALL = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]


@pytest.mark.parametrize(("at", "survives"), [(2, True), (3, False)])
async def test_a_call_of_a_tool_survives_where_nothing_of_it_was_sent(tmp_path, at, survives):
    said = (("content", "I call "), ("tool_calls", CALL), ("content", ""))
    async with running([chat("a", said, die_after=at, times=1), chat("b", said)], tmp_path) as on:
        stream = await on.stream(CHAT | {"tools": [{"type": "function"}]}, "/v1/chat/completions")
        calls = [
            event for event in stream.events if "choices" in event and event["choices"][0]["delta"].get("tool_calls")
        ]
        assert len(calls) == 1
        assert ("error" in stream.events[-1]) != survives


def responds(name, die_after=None):
    """A backend that streams a text of three parts at /v1/responses."""
    whole, item = {"id": f"resp_{name}", "status": "in_progress", "error": None}, {"id": f"msg_{name}"}
    events = [("created", {"response": whole}), ("output_item.added", {"item": item | {"type": "message"}})]
    events += [("output_text.delta", {"item_id": item["id"], "delta": text}) for text in ("a ", "b ", "c")]
    usage = {"input_tokens": 2, "output_tokens": 3}
    events += [("completed", {"response": {**whole, "status": "completed", "usage": usage}})]
    script = []
    for place, (kind, more) in enumerate(events):
        raw = json.dumps({"type": f"response.{kind}", "sequence_number": place, **more})
        script.append(f"event: response.{kind}\ndata: {raw}\n\n".encode())
    return Fake(name, step=0.01, script=script, die_after=die_after)


@pytest.mark.parametrize("at", [None, 1, 3, 4, 5])
async def test_responses_are_streamed_and_survive(tmp_path, at):
    async with running([responds("a", at), responds("b")], tmp_path) as on:
        body = {"model": "toy", "input": "hello", "temperature": 0, "stream": True}
        async with on.session.post(on.url + "/v1/responses", json=body) as response:
            raw = (await response.read()).decode()
        parts = [part.split("\ndata: ") for part in raw.split("\n\n") if part]
        found = [json.loads(data) for _, data in parts]
        assert [name.removeprefix("event: ") for name, _ in parts] == [one["type"] for one in found]
        assert [one["sequence_number"] for one in found] == list(range(6))
        assert "".join(one.get("delta", "") for one in found) == "a b c"
        assert "resp_b" not in raw and ("msg_b" not in raw or at == 1)
        (row,) = await on.rows()
        assert (row["tokens"], row["prompt_tokens"], row["survived"]) == (3, 2, int(at is not None))


async def test_the_openai_client_reads_answers_streams_and_errors(tmp_path):
    openai = pytest.importorskip("openai")
    fakes = [Fake("a", step=0.001, times=1, die_after=3), Fake("b")]
    async with running(fakes, tmp_path, cache=CacheSettings(mib=8)) as on:
        async with openai.AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0) as client:
            asked = CHAT | {"max_tokens": 8}
            stream = await client.chat.completions.create(**asked, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in stream])
            await on.settled()
            replayed = await client.chat.completions.create(**asked, stream=True)
            assert text == "".join([part.choices[0].delta.content or "" async for part in replayed])
            whole = (await client.chat.completions.create(**asked)).choices[0].message.content
            assert text == answer("once", 8) == whole
            assert (await client.models.retrieve("toy")).id == "toy"
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="tyo", prompt="x")
            assert unknown.value.code == "model_not_found"
        rows = await on.rows()
        assert (sum(row["survived"] for row in rows), [row["cache"] for row in rows][1:3]) == (1, ["hit", "hit"])
