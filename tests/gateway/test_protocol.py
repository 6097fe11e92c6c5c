"""Statuses, errors, endpoints and streams of every kind at the client."""

import json
from dataclasses import replace

import pytest
from aiohttp import web
from fake import Fake, answer, warms
from running import PROMPT, QUICK, WANTED, running

from selfspec_cli.gateway import upstream
from selfspec_cli.gateway.continuation import ResponsesAnswer
from selfspec_cli.gateway.request import RESPONSES, Request
from selfspec_cli.gateway.wire import BrokenStream, Event

STATUSES = [201, 204, 206, 301, 304, 307, 401, 403, 408, 429, 500, 503]
NO_ANSWERS = [b"<html>", b"", b"[1, 2]", b'{"error": "x"}', b"null", b"{}"]
NO_ANSWERS += [b'{"choices": null}', b'{"choices": []}', b'{"choices": [null]}']


@pytest.mark.parametrize(("status", "raw"), [(one, None) for one in STATUSES] + [(None, one) for one in NO_ANSWERS])
async def test_what_is_no_answer_is_asked_of_the_next_and_handed_on_by_few(tmp_path, status, raw):
    async with running([Fake("a", refuse=status, whole_garbage=raw), Fake("b")], tmp_path) as on:
        _, found, headers = await on.post(PROMPT)
        assert (headers["x-selfspec-backend"], found["choices"][0]["text"]) == ("b", WANTED)
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        got, found, headers = await on.post(PROMPT)
        assert (got, "location" in headers) == (status if status in (429, 500, 503) else 502, False)
        assert found["error"]["backend"] == "a"


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
            await on.gateway.upstream.get(on.gateway.replicas[0], "/metrics", 60)


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
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    async with running([Fake("a")], tmp_path) as on:
        head += b"HTTP2-Settings: AAMAAABk\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert (await on.talk(head + body, 2)).startswith(b"HTTP/1.1 200 OK\r\n")


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
        deltas = [event["choices"][0]["delta"] for event in stream.events if "choices" in event]
        assert sum("tool_calls" in delta for delta in deltas) == 1
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


def test_blanks_are_no_event_of_a_response():
    answer = ResponsesAnswer(Request(RESPONSES, {"input": "hello"}))
    assert answer.take(Event(b"")) == answer.take(Event(b" [DONE]")) == (None, False)
    for blanks in (b" ", b"\n"):
        with pytest.raises(BrokenStream, match="no JSON"):
            answer.take(Event(blanks))


# ---- Streams in every form of the standard, and every form of an error in one


@pytest.mark.parametrize(
    "form",
    [
        lambda data: b"id: 7\nevent: message\nretry: 10\ndata: " + data + b"\n\n",
        lambda data: b": a ping\n\ndata:" + data + b"\r\n\r\n",
        lambda data: b"data: " + data.replace(b", ", b",\ndata: ") + b"\n\n",
        lambda data: b"data:  \t" + data + b"\n\n\n\n",
        lambda data: b"data: " + data.replace(b'{"id"', b'{"error": null, "id"', 1) + b"\n\n",  # which is no error
    ],
)
async def test_events_in_every_form_of_the_standard_come_through(tmp_path, form):
    async with running([Fake("a", form=form)], tmp_path) as on:
        stream = await on.stream(PROMPT | {"stream_options": {"include_usage": True}})
        assert stream.text == WANTED
        assert stream.events[-1]["usage"]["completion_tokens"] == 8
        assert (await on.rows())[0]["tokens"] == 8


@pytest.mark.parametrize(
    "instead",
    [
        b'event: error\ndata: {"message": "no"}\n\n',
        b'data: {  "error": "no"}\n\n',
        b'data: {"id": "x", "error": {"message": "no"}}\n\n',
        b'data: {"object": "error", "message": "no"}\n\n',
        b'data: {"type": "error", "message": "no"}\n\n',
        b"data: 7\n\n",
        b"data: [DONE]\n\n",
        b"data: oh dear\n\n",
        b"",
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [null]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": 5}]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": ["a", null]}]}\n\n',
        b'data: {"choices": [{"text": "\\ud800"}], "n": 12345678901234567890}\n\n',
        b'data: {"choices": [], "n": 12345678901234567890, "deep": ' + b"[" * 9999 + b"]" * 9999 + b"}\n\n",
    ],
)
@pytest.mark.parametrize("at", [0, 3])
async def test_every_error_in_a_stream_is_continued_elsewhere_or_told_once(tmp_path, instead, at):
    async with running([Fake("a", garbage_after=at, garbage=instead), Fake("b")], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        if at == 0:
            assert (await on.post(PROMPT | {"stream": True}))[0] == 502
        else:
            *parts, last = (await on.stream(PROMPT)).events
            assert "error" in last and all("error" not in part for part in parts)
            assert answer("once upon", 3) == "".join(part["choices"][0]["text"] for part in parts)


def strange(more):
    """Events that have `more` in their choices, or in the event that counts tokens."""

    def form(data):
        if data[:1] == b"{":
            event = json.loads(data)
            for choice in event["choices"]:
                choice |= more
            data = json.dumps(event | ({} if event["choices"] else more)).encode()
        return b"data: " + data + b"\n\n"

    return form


@pytest.mark.parametrize(
    ("more", "body", "tried"),
    [
        ({"usage": [1]}, {}, ["a"]),  # of an answer that has ended: its tokens are counted here
        ({"usage": {"completion_tokens": "x"}}, {}, ["a"]),
        ({"logprobs": {"text_offset": ["x"]}}, {"logprobs": 1}, ["a", "b"]),
        ({"text": ["x"]}, {"stop": ["never"]}, ["a", "b"]),
        ({"text": 5}, {"stop": ["never"]}, ["a", "b"]),
    ],
)
async def test_a_backend_that_continues_in_another_form_is_one_that_failed(tmp_path, more, body, tried):
    async with running([Fake("a", die_after=4, times=1), Fake("b", form=strange(more))], tmp_path) as on:
        assert (await on.stream(PROMPT | body)).text == WANTED
        assert (await on.rows())[-1]["tried"] == tried


async def test_text_in_parts_of_its_own_form_is_handed_on_and_not_continued(tmp_path):
    """Providers send lists of parts; what was sent of them is no text that could be asked for again."""
    first = Fake("a", form=strange({"text": [{"type": "text"}]}))
    async with running([first, Fake("b")], tmp_path, kinds={"a": "openai", "b": "openai"}) as on:
        assert all(one["choices"][0]["text"] == [{"type": "text"}] for one in (await on.stream(PROMPT)).events)
        first.die_after = 3
        *_, last = (await on.stream(PROMPT)).events
        assert last["error"]["backend"] == "a"


@pytest.mark.parametrize("tokens", [-5, 10**30, True, "7"])
async def test_tokens_that_are_no_count_are_not_counted(tmp_path, tokens):
    form = strange({"usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    async with running([Fake("a", form=form)], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        row = (await on.rows())[-1]
        assert (row["prompt_tokens"], row["tokens"], row["status"]) == (3, 8, 200)


class WarmsUpForEver(Fake):
    """Sends comments alone when it is warmed up."""

    async def stream(self, request, body):
        self.times = int(warms(body))
        return await super().stream(request, body | ({"prompt": "never"} if self.times else {}))


@pytest.mark.parametrize(("kind", "at"), [(Fake, 0), (Fake, 3), (WarmsUpForEver, 0)])
async def test_comments_alone_are_no_life(tmp_path, kind, at):
    """A backend that sends them when it is warmed up is not waited for for ever."""
    quick = replace(QUICK, first_byte_seconds=1.0, stall_seconds=1.0)
    async with running([kind("a", hang_after=at, pings=True), Fake("b")], tmp_path, limits=quick) as on:
        assert (await on.stream(PROMPT)).text == WANTED
