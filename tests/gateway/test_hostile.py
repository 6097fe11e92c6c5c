"""What one client or one backend does must never be the others' outage."""

import asyncio
import errno
import hashlib
import json
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from fake import WORDS, Fake, answer, text_of, warms
from running import QUICK, running

from selfspec_cli.gateway import breaker, core, doors, server
from selfspec_cli.gateway.breaker import Breaker
from selfspec_cli.gateway.replica import State
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings, KeySettings, LedgerSettings
from selfspec_cli.gateway.upstream import address

PROMPT = {"model": "toy", "prompt": "once upon", "max_tokens": 8, "temperature": 0}
WANTED = answer("once upon", 8)
TENANTS = [
    KeySettings(name=name, key=hashlib.sha256(name.encode()).hexdigest(), admin=name == "ann")
    for name in ("ann", "bob")
]
ANN, BOB = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


# ---- one client never takes the others down --------------------------------------------------------------------------


class Poisoned(Fake):
    """Answers 500 to prompts with the word poison, whole or as an error in the stream."""

    async def complete(self, request):
        body = json.loads(await request.read())
        if "poison" not in str(body.get("prompt")):
            return await super().complete(request)
        self.asked.append(body)
        return web.json_response({"error": {"message": "engine failed on: poison"}}, status=500)


async def test_a_request_on_which_every_backend_fails_opens_no_breaker(tmp_path):
    fakes = [Poisoned(name) for name in "abc"]
    async with running(fakes, tmp_path, policy="round_robin", keys=TENANTS) as on:
        for _ in range(6):
            for more in ({}, {"stream": True}):
                assert (await on.post(PROMPT | {"prompt": "poison"} | more, **ANN))[0] == 500
        assert all(one.breaker.open_until == 0 for one in on.gateway.replicas)
        assert (await on.post(PROMPT, **BOB))[0] == 200
        assert not any("poison" in str(row["error"]) for row in await on.rows())


async def test_a_backend_that_fails_where_others_answer_is_left_alone(tmp_path):
    async with running([Fake("a", refuse=500), Fake("b")], tmp_path) as on:
        for _ in range(8):
            assert (await on.post(PROMPT))[0] == 200
        assert len(on.fakes["a"].asked) == breaker.LEAST_FAILURES


async def test_when_every_breaker_is_open_requests_are_sent_all_the_same(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path) as on:
        for one in on.gateway.replicas:
            for _ in range(5):
                one.breaker.failed()
            assert not one.sound()
        assert (await on.post(PROMPT))[0] == 200
        assert (await on.get("/health"))[0] == 200


def test_a_breaker_opens_by_the_share_of_failures_and_lets_several_requests_try():
    clock = {"at": 0.0}
    one = Breaker(lambda: clock["at"])
    for number in range(40):
        one.succeeded() if number % 4 else one.failed()
    assert one.allows()  # a quarter
    for _ in range(25):
        one.failed()
    assert not one.allows()
    clock["at"] += breaker.OPEN_SECONDS
    one.probing = breaker.PROBES - 1
    assert one.allows()
    one.probing += 1
    assert not one.allows()
    one.failed()
    one.probing = 0
    assert not one.allows()
    clock["at"] += breaker.OPEN_SECONDS
    one.succeeded()
    assert one.allows()
    for _ in range(breaker.LEAST_FAILURES - 1):
        one.failed()
    assert one.allows()
    clock["at"] += breaker.WINDOW_SECONDS + 1
    one.failed()
    assert one.allows(), "those before are forgotten"


async def test_a_long_answer_in_one_piece_is_generated_once(tmp_path):
    """It takes longer than the first event of a stream may."""
    quick = replace(QUICK, first_byte_seconds=0.2)
    async with running([Fake("a", first=0.6), Fake("b", first=0.6)], tmp_path, limits=quick) as on:
        assert (await on.post(PROMPT))[0] == 200
        assert [len(fake.asked) for fake in on.fakes.values()] == [1, 0]


async def test_a_request_that_takes_too_long_as_a_whole_ends_and_is_nobodys_failure(tmp_path):
    quick = replace(QUICK, request_seconds=0.5)
    async with running([Fake("a", step=0.2), Fake("b")], tmp_path, limits=quick) as on:
        status, found, _ = await on.post(PROMPT)
        assert (status, found["error"]["type"]) == (504, "timeout")
        stream = await on.stream(PROMPT)
        assert stream.events[-1]["error"]["code"] == 504
        assert on.fakes["b"].asked == []
        assert on.gateway.replicas[0].breaker.open_until == 0
        await until(lambda: on.fakes["a"].running == 0)


class Lists(Fake):
    """Has no /v1/models."""

    async def models(self, request):
        return web.Response(status=404)


async def test_a_backend_without_a_list_of_models_serves_the_one_that_is_named(tmp_path):
    more = {"kinds": {"a": "openai"}, "backends": {"a": {"model": "toy"}}}
    async with running([Lists("a")], tmp_path, **more) as on:
        assert (await on.post(PROMPT))[0] == 200


async def test_a_backend_of_others_is_looked_at_while_it_is_up(tmp_path):
    async with running([Fake("a")], tmp_path, kinds={"a": "openai"}) as on:
        await on.fakes["a"].stop()
        await until(lambda: on.gateway.replicas[0].state is State.down)
        await on.fakes["a"].start()


@pytest.mark.parametrize(
    ("base", "wanted"),
    [
        ("http://h:1", "http://h:1/v1/completions"),
        ("http://h/v1/", "http://h/v1/completions"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai/completions"),
        ("https://h/openai/deployments/x?api-version=3", "https://h/openai/deployments/x/completions?api-version=3"),
    ],
)
def test_addresses_of_other_forms(base, wanted):
    assert address(base, "/v1/completions") == wanted


async def test_requests_wait_for_a_place_and_each_tenant_has_its_turn(tmp_path):
    full = {"a": {"at_once": 1}}
    patient = replace(QUICK, queue_seconds=20)
    async with running([Fake("a", step=0.02)], tmp_path, backends=full, keys=TENANTS, limits=patient) as on:
        order = []

        async def one(name):
            assert (await on.post(PROMPT, Authorization=f"Bearer {name}"))[0] == 200
            order.append(name)

        first = asyncio.ensure_future(one("ann"))
        await until(lambda: on.fakes["a"].running == 1)
        waiting = [asyncio.ensure_future(one("ann")) for _ in range(4)]
        await until(lambda: len(on.gateway.places) == 4)
        other = asyncio.ensure_future(one("bob"))
        await until(lambda: len(on.gateway.places) == 5)
        assert 'queue{class="interactive"} 5.0' in await (await on.session.get(on.url + "/metrics")).text()
        await asyncio.gather(first, other, *waiting)
        assert order.index("bob") <= 2
        assert not on.gateway.places.waiting


async def test_a_place_that_does_not_come_is_a_503_with_a_time(tmp_path):
    async with running([Fake("a", step=0.2)], tmp_path, backends={"a": {"at_once": 1}}) as on:
        busy = asyncio.ensure_future(on.post(PROMPT))
        await until(lambda: on.fakes["a"].running == 1)
        status, found, headers = await on.post(PROMPT)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "full" in found["error"]["message"]
        assert not on.gateway.places.waiting
        assert (await busy)[0] == 200


class Busy(Fake):
    """Asks to be left alone."""

    async def complete(self, request):
        if self.refuse is None:
            return await super().complete(request)
        self.asked.append({})
        return web.json_response({}, status=self.refuse, headers={"Retry-After": "7"})


async def test_retry_after_is_honoured_and_handed_on(tmp_path):
    async with running([Busy("a"), Busy("b")], tmp_path) as on:
        on.fakes["a"].refuse = 429
        for _ in range(3):
            assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "b"
        assert len(on.fakes["a"].asked) == 1
        on.fakes["b"].refuse = 429
        status, found, headers = await on.post(PROMPT)
        assert (status, headers["retry-after"], found["error"]["backend"]) == (429, "7", "b")
        status, _, headers = await on.post(PROMPT)
        assert (status, int(headers["retry-after"]) >= 5) == (503, True)
        assert len(on.fakes["b"].asked) == 4


async def test_too_many_files_are_the_gateways_own_matter(tmp_path, monkeypatch):
    async with running([Fake("a")], tmp_path) as on:
        key = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)

        async def full(*given, **more):
            raise aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "too many open files"))

        monkeypatch.setattr(on.gateway.upstream.session, "request", full)
        for _ in range(5):
            status, found, headers = await on.post(PROMPT)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "file descriptors" in found["error"]["message"]
        monkeypatch.undo()
        assert on.gateway.replicas[0].breaker.open_until == 0
        assert (await on.post(PROMPT))[0] == 200


# ---- streams in every form -------------------------------------------------------------------------------------------


class Odd(Fake):
    """Writes its events in a form of its own; from event `at` on what `instead` is."""

    write = staticmethod(lambda data: b"data: " + data + b"\n\n")
    at, instead = None, b""

    async def stream(self, request, body):
        if warms(body):
            return await super().stream(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids, tokens = self.plan(body)
        head = {"id": "x", "object": "text_completion", "created": 1, "model": self.model}
        for place, token in enumerate(tokens):
            if place == self.at:
                await response.write(self.instead)
                return response
            choice = {"index": 0, "text": WORDS[token], "finish_reason": "length" if place + 1 == len(tokens) else None}
            if body.get("return_token_ids"):
                choice |= {"token_ids": [token], "prompt_token_ids": None if place else ids}
            await response.write(self.write(json.dumps({**head, "choices": [choice]}).encode()))
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        await response.write(self.write(json.dumps({**head, "choices": [], "usage": usage}).encode()))
        await response.write(self.write(b"[DONE]"))
        return response


@pytest.mark.parametrize(
    "form",
    [
        lambda data: b"id: 7\nevent: message\nretry: 10\ndata: " + data + b"\n\n",
        lambda data: b": a comment\ndata: " + data + b"\n\n",
        lambda data: b": a ping\n\ndata:" + data + b"\n\n",
        lambda data: b"data: " + data + b"\r\n\r\n",
        lambda data: b"data: " + data + b"\r\r",
        lambda data: b"data: " + data.replace(b", ", b",\ndata: ") + b"\n\n",
        lambda data: b"data:  \t" + data + b"\n\n\n\n",
        lambda data: b"data: " + data + b"\nid\n\n",
    ],
)
async def test_events_in_every_form_of_the_standard_come_through(tmp_path, form):
    fake = Odd("a")
    fake.write = form
    async with running([fake], tmp_path) as on:
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
        b"data: [DONE]\n\n",
        b"data: oh dear\n\n",
        b"",
    ],
)
@pytest.mark.parametrize("at", [0, 3])
async def test_every_error_in_a_stream_is_continued_elsewhere_or_told_once(tmp_path, instead, at):
    fake = Odd("a")
    fake.at, fake.instead = at, instead
    async with running([fake, Fake("b")], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        if at == 0:
            assert (await on.post(PROMPT | {"stream": True}))[0] == 502
        else:
            *parts, last = (await on.stream(PROMPT)).events
            assert "error" in last and all("error" not in part for part in parts)
            assert text_of(answer_ids()[:3]) == "".join(part["choices"][0]["text"] for part in parts)


def answer_ids():
    from fake import encode, generated

    return generated(encode("once upon"), 8)


async def test_an_error_that_is_null_is_none(tmp_path):
    fake = Odd("a")
    fake.write = lambda data: b"data: " + data.replace(b'{"id"', b'{"error": null, "id"', 1) + b"\n\n"
    async with running([fake], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED


@pytest.mark.parametrize("at", [0, 3])
async def test_pings_alone_are_no_life(tmp_path, at):
    class Pings(Odd):
        async def stream(self, request, body):
            response = await super().stream(request, body)
            while not warms(body):
                await response.write(b": ping\n\n")
                await asyncio.sleep(0.05)
            return response

    fake = Pings("a")
    fake.at = at
    quick = replace(QUICK, first_byte_seconds=0.4)
    async with running([fake, Fake("b")], tmp_path, limits=quick) as on:
        assert (await on.stream(PROMPT)).text == WANTED


# ---- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [201, 204, 206, 301, 304, 307, 408])
async def test_a_status_that_is_no_answer_is_never_handed_on(tmp_path, status):
    async with running([Fake("a", refuse=status), Fake("b")], tmp_path) as on:
        assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "b"
        on.gateway.replicas[1].draining = True
        got, found, headers = await on.post(PROMPT)
        assert (got, "location" in headers) == (502, False)
        assert found["error"]["backend"] == "a"


@pytest.mark.parametrize("raw", [b'{"choices": null}', b'{"choices": []}', b'{"choices": [null]}', b"null", b"{}"])
async def test_an_answer_without_choices_is_none(tmp_path, raw):
    async with running([Fake("a", whole_garbage=raw)], tmp_path) as on:
        assert (await on.post(PROMPT))[0] == 502


class Refusing(Fake):
    """Refuses in the way of a provider."""

    async def complete(self, request):
        error = {"message": "too long: SECRET", "type": "invalid_request_error", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=self.refuse or 400)


async def test_codes_stay_and_a_providers_401_is_the_gateways_own(tmp_path):
    async with running([Refusing("a")], tmp_path, kinds={"a": "openai"}) as on:
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
        page = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        async with on.session.options(on.url + "/v1/completions", headers=page) as response:
            assert response.headers["access-control-allow-origin"] == "https://app.example"
        async with on.session.options(on.url + "/v1/completions", headers=page | {"Origin": "https://x"}) as response:
            assert "access-control-allow-origin" not in response.headers


async def test_integers_of_any_size_are_handed_on(tmp_path):
    async with running([Fake("a")], tmp_path) as on:
        large = 2**80 + 1
        await on.post(json.dumps(PROMPT | {"seed": large, "logit_bias": {"1": -large}}).encode())
        assert (on.fakes["a"].asked[-1]["seed"], on.fakes["a"].asked[-1]["logit_bias"]) == (large, {"1": -large})


class Ranks(Fake):
    """Answers /v1/rerank."""

    async def start(self):
        await super().start()

    async def complete(self, request):
        if request.path == "/v1/rerank":
            return web.json_response({"id": "r", "results": [{"index": 0, "relevance_score": 0.5}]})
        return await super().complete(request)


async def test_rerank(tmp_path):
    async with running([Ranks("a")], tmp_path) as on:
        status, found, _ = await on.post({"model": "toy", "query": "q", "documents": ["d"]}, "/v1/rerank")
        assert (status, found["results"][0]["index"]) == (200, 0)
        assert (await on.post({"model": "toy"}, "/v1/rerank"))[0] == 400


class Thinks(Fake):
    """A chat of named kinds of text, as a script: (field, text); dies after some of them."""

    script = (("reasoning", "let me "), ("reasoning", "think. "), ("content", "so "), ("content", "be it"))

    async def stream(self, request, body):
        if warms(body):
            return await super().stream(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        parts = [{"role": "assistant", "content": ""}, *({name: text} for name, text in self.script)]
        for place, delta in enumerate(parts):
            if place == self.die_after and self.times > 0:
                self.times -= 1
                request.transport.abort()
                return response
            finish = "stop" if place + 1 == len(parts) else None
            event = {"id": self.name, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response


CHAT = {"model": "toy", "messages": [{"role": "user", "content": "once"}], "temperature": 0}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
async def test_a_chat_with_reasoning_survives(tmp_path, at):
    async with running([Thinks("a", die_after=at, times=1), Thinks("b")], tmp_path) as on:
        stream = await on.stream(CHAT, "/v1/chat/completions")
        deltas = [event["choices"][0]["delta"] for event in stream.events]
        texts = {name: "".join(one.get(name) or "" for one in deltas) for name in ("reasoning", "content")}
        assert texts == {"reasoning": "let me think. ", "content": "so be it"}
        assert (await on.rows())[0]["survived"] == 1


CALL = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]


@pytest.mark.parametrize(("at", "survives"), [(2, True), (3, False)])
async def test_a_call_of_a_tool_survives_where_nothing_of_it_was_sent(tmp_path, at, survives):
    fakes = [Thinks("a", die_after=at, times=1), Thinks("b")]
    for fake in fakes:
        fake.script = (("content", "I call "), ("tool_calls", CALL), ("content", ""))
    async with running(fakes, tmp_path) as on:
        stream = await on.stream(CHAT | {"tools": [{"type": "function"}]}, "/v1/chat/completions")
        calls = [
            event for event in stream.events if "choices" in event and event["choices"][0]["delta"].get("tool_calls")
        ]
        assert len(calls) == 1
        assert ("error" in stream.events[-1]) != survives


class Responds(Fake):
    """/v1/responses as a stream."""

    async def complete(self, request):
        body = json.loads(await request.read())
        if request.path != "/v1/responses":
            return await super().complete(request)
        self.asked.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        whole = {"id": f"resp_{self.name}", "status": "in_progress", "error": None}
        item = {"id": f"msg_{self.name}", "type": "message"}
        events = [("response.created", {"response": whole}), ("response.output_item.added", {"item": item})]
        events += [("response.output_text.delta", {"item_id": item["id"], "delta": text}) for text in ("a ", "b ", "c")]
        usage = {"input_tokens": 2, "output_tokens": 3}
        events += [("response.completed", {"response": {**whole, "status": "completed", "usage": usage}})]
        for place, (kind, more) in enumerate(events):
            if place == self.die_after:
                request.transport.abort()
                return response
            raw = json.dumps({"type": kind, "sequence_number": place, **more})
            await response.write(f"event: {kind}\ndata: {raw}\n\n".encode())
            await asyncio.sleep(0.01)
        return response


@pytest.mark.parametrize("at", [None, 1, 3, 4, 5])
async def test_responses_are_streamed_and_survive(tmp_path, at):
    async with running([Responds("a", die_after=at), Responds("b")], tmp_path) as on:
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


# ---- memory and doors ------------------------------------------------------------------------------------------------


async def talk(on, raw, wait=5):
    """What a raw client gets until the connection is closed, or nothing more comes."""
    reader, writer = await asyncio.open_connection(*on.url.removeprefix("http://").split(":"))
    writer.write(raw)
    found = b""
    try:
        async with asyncio.timeout(wait):
            while part := await reader.read(65536):
                found += part
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/gateway/feedback", "/nothing"])
async def test_the_key_is_looked_at_before_the_body(tmp_path, path):
    async with running([Fake("a")], tmp_path, keys=TENANTS) as on:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n"
        assert (await talk(on, head.encode(), 2)).startswith(b"HTTP/1.1 401")
        assert on.gateway.memory.held == 0


async def test_heads_that_are_too_large_or_too_slow_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(doors, "HEAD_SECONDS", 0.3)
    async with running([Fake("a")], tmp_path) as on:
        large = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"x-a: " + b"y" * 200_000 + b"\r\n\r\n"
        assert (await talk(on, large)).startswith(b"HTTP/1.1 431")
        endless = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
        assert (await talk(on, endless)).startswith(b"HTTP/1.1 431")
        assert await talk(on, b"GET /health HTTP/1.1\r\nHo") == b""  # closed, long before the five seconds of `talk`
        assert await talk(on, b"") == b""
        kept = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await talk(on, kept + kept, 1)).count(b"HTTP/1.1 200") == 2
        assert (await on.stream(PROMPT | {"max_tokens": 300})).text == answer("once upon", 300)


async def test_connections_beyond_the_limit_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    async with running([Fake("a")], tmp_path) as on:
        host, port = on.url.removeprefix("http://").split(":")
        open_ones = [await asyncio.open_connection(host, port) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (await talk(on, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503")
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.1)
        assert (await on.post(PROMPT))[0] == 200


async def test_bodies_that_do_not_fit_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(core, "BODIES", 2)
    small = replace(QUICK, body_mib=0.1)
    async with running([Fake("a", first=0.5)], tmp_path, limits=small) as on:
        body = PROMPT | {"prompt": "x" * 90_000, "max_tokens": 1}
        found = await asyncio.gather(*(on.post(body) for _ in range(5)))
        assert sorted(status for status, _, _ in found) == [200, 200, 503, 503, 503]
        await on.settled()
        assert on.gateway.memory.held == 0
        assert (await on.post(PROMPT))[0] == 200


async def test_a_long_body_of_token_ids_is_read_and_streams_go_on(tmp_path):
    async with running([Fake("a", step=0.01)], tmp_path) as on:
        long = asyncio.ensure_future(on.post(PROMPT | {"prompt": [5] * 400_000, "max_tokens": 0}))
        assert (await on.stream(PROMPT)).text == WANTED
        assert (await long)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "https://app.example"}, 200),
        ({}, 200),
    ],
)
async def test_control_endpoints_answer_no_page_of_others(tmp_path, headers, status):
    async with running([Fake("a")], tmp_path, origins=["https://app.example"]) as on:
        async with on.session.post(on.url + "/gateway/backends/a/drain", headers=headers) as response:
            assert response.status == status
        assert on.gateway.replicas[0].draining == (status == 200)


async def test_files_are_the_owners_alone(tmp_path):
    from selfspec_cli.gateway.settings import CacheSettings

    async with running([Fake("a")], tmp_path, cache=CacheSettings(mib=1)) as on:
        await on.post(PROMPT)
        await on.rows()
        for file in (tmp_path / "gateway").iterdir():
            assert file.stat().st_mode & 0o077 == 0, file


@pytest.mark.parametrize("body", [b'{"prompt": "SECRET", "model": "SECRET"}', b'{"stream": "SECRET"}', b"SECRET"])
async def test_no_error_in_the_log_quotes_the_request(tmp_path, body):
    async with running([Fake("a", refuse=422)], tmp_path) as on:
        await on.post(body)
        await on.post(PROMPT)
        assert "SECRET" not in json.dumps(await on.rows())


async def test_a_key_has_models_and_money(tmp_path):
    ann = replace(TENANTS[0], models=["toy"], money_per_day=20.0)
    backends = {"a": {"price_out": 1e6, "serves": ["other"]}}
    async with running([Fake("a")], tmp_path, keys=[ann, TENANTS[1]], backends=backends) as on:
        status, found, _ = await on.post(PROMPT | {"model": "other"}, **ANN)
        assert (status, found["error"]["param"]) == (403, "model")
        assert [one["id"] for one in json.loads((await on.get("/v1/models", **ANN))[1])["data"]] == ["toy"]
        statuses = [(await on.post(PROMPT, **ANN))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]  # eight tokens cost eight
        _, found, headers = await on.post(PROMPT, **ANN)
        assert (found["error"]["code"], int(headers["retry-after"]) > 0) == ("insufficient_quota", True)
        assert (await on.post(PROMPT | {"model": "other"}, **BOB))[0] == 200


async def test_settings_are_reloaded_without_losing_a_stream(tmp_path):
    old, new = Fake("a", step=0.03), Fake("b")
    await new.start()
    async with running([old], tmp_path, keys=TENANTS) as on:
        stream = asyncio.ensure_future(on.stream(PROMPT | {"max_tokens": 30}, **ANN))
        await until(lambda: old.running == 1)
        backends = [BackendSettings(name="b", kind="local", url=new.url)]
        settings = GatewaySettings(backends=backends, keys=TENANTS[:1], ledger=LedgerSettings(0.0), limits=QUICK)
        known = on.gateway.keys.tenant("Bearer ann")
        await server.reload(on.gateway, on.looking, settings)
        await until(lambda: on.gateway.replicas[0].state is State.up)
        assert on.gateway.keys.tenant("Bearer ann") is known
        assert (await on.post(PROMPT, **BOB))[0] == 401
        assert (await on.post(PROMPT, **ANN))[2]["x-selfspec-backend"] == "b"
        assert (await stream).text == answer("once upon", 30)
    await new.stop()
