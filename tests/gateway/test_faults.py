"""Backends that die, hang and answer garbage, clients that vanish and that are slow, very many of them, and who is
blamed for a failure."""

import asyncio
import errno
import gc
import json
import os
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from fake import Fake, answer
from running import ANN, BOB, QUICK, TENANTS, running, started, until

from selfspec_cli.gateway import replica, supervisor, upstream
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.client import Client, watch
from selfspec_cli.gateway.replica import LEAST_FAILURES, Breaker, State
from selfspec_cli.gateway.settings import LimitSettings
from selfspec_cli.gateway.timing import FEW
from selfspec_cli.gateway.upstream import address

PROMPT = {"model": "toy", "prompt": "once upon", "max_tokens": 30, "temperature": 0}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "once upon"}], "max_tokens": 30, "temperature": 0}
PATHS = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}
WANTED = answer("once upon", 30)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", ["die_after", "hang_after", "garbage_after"])
@pytest.mark.parametrize("at", [0, 1, 11, 29])
async def test_a_stream_survives_and_the_client_gets_the_very_text_once(tmp_path, path, fault, at):
    bad, good = Fake("bad", step=0.001, times=1, **{fault: at}), Fake("good")
    limits = replace(QUICK, stall_seconds=1.0, first_byte_seconds=1.0) if fault == "hang_after" else QUICK
    async with running([bad, good], tmp_path, limits=limits) as on:
        usage = {"stream_options": {"include_usage": True}}
        stream = await on.stream(PATHS[path] | usage, path)
        assert stream.text == WANTED
        finishes = [one["choices"][0]["finish_reason"] for one in stream.events if one.get("choices")]
        assert finishes[-1] == "length" and set(finishes[:-1]) == {None}
        assert stream.events[-1]["usage"]["completion_tokens"] == 30
        assert len({event["id"] for event in stream.events if event.get("choices")}) == 1
        (row,) = await on.rows()
        assert (row["status"], row["tokens"], row["route"]) == (200, 30, "good")
        begun = path != "/v1/completions" or at > 0  # a chat begins with the role, before any token
        assert row["tried"] == ["bad"]
        assert row["survived"] == (1 if begun else 0)
        assert (row["lost_ms"] is not None) == begun
        if begun:
            continued = on.fakes["good"].asked[-1]
            assert isinstance(continued["prompt"], list) or at == 0  # token ids: no text is cut into tokens anew
            assert continued["max_tokens"] == 30 - at
            text = (await on.get("/metrics"))[1]
            assert 'selfspec_gateway_streams_continued_total{backend="good"} 1.0' in text
            assert "selfspec_gateway_stream_lost_seconds_total 0.0\n" not in text


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_has_ended_is_not_continued(tmp_path, path):
    """Its connection breaks after the event that says why it has ended, before the usage."""
    async with running([Fake("a", die_after=30), Fake("b")], tmp_path) as on:
        stream = await on.stream(PATHS[path], path)
        assert stream.text == WANTED
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
        assert on.fakes["b"].asked == []
        (row,) = await on.rows()
        assert (row["status"], row["tokens"], row["survived"]) == (200, 30, 0)


async def test_of_several_answers_all_have_to_end(tmp_path):
    async with running([Fake("a", die_after=30), Fake("b")], tmp_path) as on:
        assert "error" in (await on.stream(PROMPT | {"n": 2})).events[-1]


class Several(Fake):
    """Tells at its end that two answers have ended."""

    def events(self, body):
        head, made, end = super().events(body)
        return head, [*made, made[-1]], end


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["once", "upon"]}])
async def test_the_time_for_a_token_is_not_that_of_a_stream_of_several_answers(tmp_path, several):
    async with running([Several("a", step=0.001)], tmp_path) as on:
        await on.stream(PROMPT | several)
        (row,) = await on.rows()
        assert (row["status"], row["tokens"], row["tpot_ms"]) == (200, 30, None)
        assert on.gateway.replicas[0].per_event is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("state", "left"), [({}, 30 - 7 - 9), ({"stop": ["never"]}, 30)])
async def test_it_survives_twice(tmp_path, path, state, left):
    """A greedy request with state is asked again, and what the client has is left out."""
    fakes = [Fake("a", times=1, die_after=7), Fake("b", times=1, die_after=3 if state else 9), Fake("c")]
    async with running(fakes, tmp_path) as on:
        assert (await on.stream(PATHS[path] | state, path)).text == WANTED
        assert on.fakes["c"].asked[-1]["max_tokens"] == left
        assert on.fakes["c"].asked[-1].get("stop") == state.get("stop")


async def test_another_answer_is_never_glued_to_the_first(tmp_path):
    """The second backend has another model under the same name: what it says is not what the client has."""
    bad, other = Fake("bad", die_after=7), Fake("other")
    other.plan = lambda body: ([1], [5] * 30)  # type: ignore[method-assign]
    async with running([bad, other], tmp_path) as on:
        stream = await on.stream(PROMPT | {"stop": ["never"]})
        assert "error" in stream.events[-1]
        assert "w5 w5" not in stream.text
        assert WANTED.startswith(stream.text)
        assert len(on.fakes["other"].asked) >= 1  # what was compared, and not sent


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"temperature": 1.0, "stop": ["never"]}, {}),  # sampled, with state
        ({"n": 2}, {}),
        ({}, {"backends": {"good": {"weights": "other"}}}),  # no backend has the same weights
        ({}, {"kinds": {"good": "quantised"}}),
    ],
)
async def test_what_cannot_be_continued_ends_with_an_error_that_names_the_backend(tmp_path, more, other):
    async with running([Fake("bad", times=1, die_after=7), Fake("good")], tmp_path, **other) as on:
        stream = await on.stream(PROMPT | more)
        assert stream.events[-1]["error"]["backend"] == "bad"
        assert (await on.rows())[0]["status"] == 502


async def test_where_all_fail_the_client_is_told_which(tmp_path):
    async with running([Fake("a", refuse=500), Fake("b", refuse=503)], tmp_path) as on:
        status, found, _ = await on.post(PROMPT)
        assert (status, found["error"]["backend"]) == (503, "b")


async def test_the_breaker_opens_and_closes(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "OPEN_SECONDS", 2.0)  # longer than four requests take
    async with running([Fake("a", refuse=500), Fake("b")], tmp_path) as on:
        for _ in range(4):
            await on.post(PROMPT)
        asked = len(on.fakes["a"].asked)
        assert asked == LEAST_FAILURES  # then it is left alone
        assert 'backend_up{backend="a"} 0.0' in (await on.get("/metrics"))[1]
        on.fakes["a"].refuse = None
        await asyncio.sleep(replica.OPEN_SECONDS + 0.05)
        assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "a"
        assert 'backend_up{backend="a"} 1.0' in (await on.get("/metrics"))[1]


async def test_a_backend_that_goes_and_comes_back_is_seen(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path) as on:
        first, second = on.gateway.replicas
        on.fakes["a"].dead = True
        await until(lambda: first.state is State.down)
        assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "b"
        assert json.loads((await on.get("/gateway/routes"))[1])["backends"][0]["state"] == "down"
        on.fakes["a"].dead = False
        await until(lambda: first.state is State.up)
        assert (await on.post(PROMPT))[2]["x-selfspec-backend"] == "a"
        on.fakes["b"].dead = on.fakes["a"].dead = True
        await until(lambda: first.state is second.state is State.down)
        status, _, headers = await on.post(PROMPT)
        assert (status, headers["retry-after"]) == (503, "1")
        assert (await on.get("/health"))[0] == 503


async def test_a_server_that_was_started_anew_has_nothing_in_its_prefix_cache(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path, policy="sticky_until_saturated") as on:
        for _ in range(2):
            await on.post(PROMPT)
        on.fakes["a"].dead = True
        await until(lambda: on.gateway.replicas[0].state is State.down)
        on.fakes["a"].dead = False
        await until(lambda: on.gateway.replicas[0].state is State.up)
        await on.post(PROMPT)
        assert [row["reason"] for row in await on.rows()] == ["cold", "warm", "cold"]


async def test_a_client_that_vanishes_stops_its_backend_and_nobody_else(tmp_path):
    async with running([Fake("a", step=0.05)], tmp_path) as on:
        other = asyncio.ensure_future(on.stream(PROMPT | {"max_tokens": 15}))
        for stream in (True, False):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(on.post(PROMPT | {"stream": stream, "max_tokens": 200}), 0.2)
        assert (await other).text == answer("once upon", 15)
        await until(lambda: not on.fakes["a"].running and not on.gateway.replicas[0].flights)
        assert on.fakes["a"].aborted == 2
        assert sorted(row["status"] for row in await on.rows()) == [200, 499, 499]


PRICES = {"price_in": 1e6, "price_out": 1e6}  # a token costs one
LETTERS_OF_PROMPT = len(PROMPT["prompt"])


async def test_tokens_that_a_client_left_behind_are_counted_and_cost(tmp_path):
    """Otherwise nobody who hangs up before the end would ever reach tokens_per_minute."""
    key = replace(TENANTS[0], tokens_per_minute=1000)
    async with running([Fake("a", step=0.01)], tmp_path, keys=[key], backends={"a": PRICES}) as on:
        body = PROMPT | {"max_tokens": 500, "stream": True}
        async with on.session.post(on.url + "/v1/completions", json=body, headers=ANN) as response:
            for _ in range(20):
                await response.content.readuntil(b"\n\n")
        (row,) = await on.rows()
        assert row["status"] == 499
        assert (row["prompt_tokens"], 15 < row["tokens"] < 500) == (LETTERS_OF_PROMPT, True)
        assert row["cost"] == LETTERS_OF_PROMPT + row["tokens"]
        with on.gateway.meter._changed(key) as (_, used):
            assert used["tokens"] == pytest.approx(1000 - row["cost"], abs=50)  # what has come back meanwhile


async def test_each_backend_of_a_stream_is_paid_for_what_it_did(tmp_path):
    dear = {name: 10 * price for name, price in PRICES.items()}
    async with running([Fake("a", die_after=7), Fake("b")], tmp_path, backends={"a": PRICES, "b": dear}) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        (row,) = await on.rows()
        assert (row["prompt_tokens"], row["tokens"]) == (LETTERS_OF_PROMPT, 30)
        assert row["cost"] == (LETTERS_OF_PROMPT + 7) + 10 * (LETTERS_OF_PROMPT + 7 + 23)


@pytest.mark.parametrize("fault", [{"refuse": 400}, {"refuse": 503}, {"dead": True}])
async def test_a_dear_backend_that_does_not_answer_costs_nothing_and_the_cheap_answer_is_taken(tmp_path, fault):
    backends = {"cheap": {"price_out": 1e6}, "dear": {"price_out": 1e7}}
    fakes = [Fake("cheap", unsure=-3.0), Fake("dear")]
    async with running(fakes, tmp_path, policy="cascade", backends=backends) as on:
        vars(fakes[1]).update(fault)
        status, found, headers = await on.post(PROMPT | {"prompt": "hard"})
        assert (status, headers["x-selfspec-backend"]) == (200, "cheap")
        assert found["choices"][0]["text"] == answer("hard", 30)
        assert (await on.rows())[0]["cost"] == 30


async def test_what_is_expected_is_that_of_the_backend_that_answers(tmp_path):
    async with running([Fake("a"), Fake("b", first=0.2)], tmp_path) as on:
        for _ in range(FEW + 3):
            await on.stream(PROMPT | {"selfspec": {"backend": "b"}})
        on.fakes["a"].refuse = 500
        await on.stream(PROMPT)
        row = (await on.rows())[-1]
        assert (row["route"], row["tried"]) == ("b", ["a"])
        assert row["expected_ttft_ms"] > 100


async def test_a_server_that_prefills_and_answers_garbage_is_one_that_failed(tmp_path):
    prefill = Fake("prefill", whole_garbage=b"<html>")
    async with started(prefill):
        more = {"kinds": {"a": "split"}, "backends": {"a": {"prefill": prefill.url}}}
        async with running([Fake("a"), Fake("b")], tmp_path, **more) as on:
            assert (await on.post(PROMPT))[1]["choices"][0]["text"] == WANTED
            assert (await on.rows())[0]["tried"] == ["a"]


async def test_what_is_done_before_a_warm_up_takes_nothing_of_its_time_and_may_ask_the_backend(tmp_path, monkeypatch):
    waits = [1.2]

    async def before(upstream, replica, path, body):
        await asyncio.sleep(waits.pop() if waits else 0)
        async with upstream.post(replica, path, {**body, "max_tokens": 1}, {}):
            return body

    monkeypatch.setitem(BACKENDS._found, "slow", replace(BACKENDS["split"], before=before))
    monkeypatch.setattr(supervisor, "FEW", 1)
    async with running([Fake("a")], tmp_path, kinds={"a": "slow"}, limits=replace(QUICK, first_byte_seconds=1.0)) as on:
        assert on.gateway.replicas[0].timing.ttft.seen == 1


class Long(Fake):
    """Streams a token of 64 KiB a thousand times where the prompt is `long`; counts the bytes that it got rid of."""

    written = 0

    async def stream(self, request, body):
        if body["prompt"] != "long":
            return await super().stream(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "text": "x" * 2**16, "finish_reason": None}
        event = b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"
        for _ in range(1000):
            await response.write(event)
            self.written += len(event)
        return response


@asynccontextmanager
async def unread(on, count):
    """Clients that ask for a long stream and read nothing of it."""
    host, port = on.address
    body = json.dumps(PROMPT | {"prompt": "long", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection((host, int(port))) for _ in range(count)]
    for one in sockets:
        one.sendall(head.encode() + body)
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


async def test_clients_that_do_not_read_fill_no_memory_and_hold_up_nobody(tmp_path):
    count, whole = 10, 1000 * 2**16  # bytes of each stream
    async with running([Long("a")], tmp_path) as on:
        backend = on.fakes["a"]
        before = resident()
        async with unread(on, count):
            await until(lambda: backend.running == count and backend.written > 0)
            seen = -1
            while backend.written != seen:  # until nobody takes any more
                seen = backend.written
                assert (await on.stream(PROMPT)).text == WANTED
                await asyncio.sleep(0.5)
            assert seen < count * whole / 2
            assert resident() < before + 100, "MiB"
            assert on.gateway.inside == count
        await until(lambda: on.gateway.inside == 0 and backend.running == 0)
        assert len(on.gateway.replicas[0].flights) == 0


async def test_a_client_that_does_not_read_is_left_after_a_while(tmp_path):
    """Its place at the backend is free again, for others."""
    impatient = replace(QUICK, unread_seconds=0.5)
    async with running([Long("a")], tmp_path, limits=impatient, backends={"a": {"at_once": 1}}) as on:
        async with unread(on, 1):
            await until(lambda: len(on.gateway.replicas[0].flights) == 1)
            assert (await on.post(PROMPT))[0] == 503
            await until(lambda: on.gateway.inside == 0 and on.fakes["a"].running == 0)
            assert (await on.stream(PROMPT | {"max_tokens": 1500})).text == answer("once upon", 1500)
        row = next(row for row in await on.rows() if row["status"] == 499)
        assert "read nothing" in row["error"]


@pytest.mark.parametrize("more", [True, False])
async def test_a_client_that_does_not_read_the_end_of_its_answer_is_left_too(more):
    never = asyncio.Event()

    async def full(message):
        if message["type"] == "http.response.body":
            await never.wait()

    client = Client(full, {})
    sending = asyncio.ensure_future(client.part(b"x", more))
    assert "read nothing" in await watch(never.wait, client, sending, 0.2)
    with pytest.raises(asyncio.CancelledError):
        await sending


async def read_all(reader):
    """What comes until the connection is closed, or reset because bytes were on their way to it."""
    found = b""
    with suppress(ConnectionResetError):
        while part := await reader.read(4096):
            found += part
    return found


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_client_that_does_not_send_its_whole_request_holds_no_place(tmp_path, goes_on):
    """It stops in the middle, or sends a byte at a time."""
    async with running([Fake("a")], tmp_path, limits=replace(QUICK, unread_seconds=0.3)) as on:
        reader, writer = await asyncio.open_connection(*on.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answered = asyncio.ensure_future(read_all(reader))  # to its end: the connection is closed
        for _ in range(99 * goes_on):
            if not answered.done():
                writer.write(b" ")
                await asyncio.sleep(0.02)
        head, _, body = (await answered).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert json.loads(body)["error"]["message"] == "the body had not come after 0.3 s"
        assert on.gateway.inside == 0
        writer.close()


async def test_a_thousand_streams_at_once_are_neither_lost_nor_mixed_up(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "LEAST_FAILURES", 1000)
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 50)
    fakes = [Fake("a", first=0.3), Fake("b", first=0.3, die_after=5, times=25)]
    patient = LimitSettings(first_byte_seconds=50, stall_seconds=50)
    async with running(fakes, tmp_path, policy="round_robin", limits=patient) as on:
        await many(on, 50)  # what is allocated once
        fakes[1].times = 25
        before = resident()
        texts = await many(on, 1000)
        assert [text for text in texts if text is None] == []
        assert max(fake.running for fake in fakes) == 0
        assert on.gateway.inside == 0
        assert all(not one.flights for one in on.gateway.replicas)
        assert sum(len(row["tried"]) for row in await on.rows()) == 50
        gc.collect()
        assert resident() < before + 120, "MiB"
        left = len(asyncio.all_tasks())
        await asyncio.sleep(1.0)
        looks = 2 * len(fakes)  # one at each backend may be under way: a task here, and one of the backend's
        assert len(asyncio.all_tasks()) <= left + looks


async def many(on, count):
    async def one(number):
        stream = await on.stream(PROMPT | {"prompt": f"number {number}", "max_tokens": 8})
        return stream.text if stream.text == answer(f"number {number}", 8) else None

    return await asyncio.gather(*map(one, range(count)))


def resident():
    """MiB of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def test_a_request_in_flight_ends_when_the_gateway_is_told_to(tmp_path):
    async with running([Fake("a", step=0.02)], tmp_path) as on:
        running_stream = asyncio.ensure_future(on.stream(PROMPT))
        await until(lambda: on.fakes["a"].running == 1)
        on.gateway.draining = True
        status, found, _ = await on.post(PROMPT)
        assert (status, found["error"]["message"]) == (503, "the gateway is ending")
        assert (await running_stream).text == WANTED


async def test_a_fault_of_the_gateways_own_is_one_requests_alone(tmp_path, monkeypatch, capsys):
    async with running([Fake("a")], tmp_path) as on:
        monkeypatch.setattr(on.gateway, "_route", lambda *_: 1 / 0)
        status, found, _ = await on.post(PROMPT)
        assert (status, found["error"]["type"]) == (500, "internal_error")
        monkeypatch.undo()
        assert (await on.post(PROMPT))[0] == 200
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---- Failures are weighed by cause: one client, and one request, never take the others down --------------------------


async def test_a_request_on_which_every_backend_fails_opens_no_breaker(tmp_path):
    fakes = [Fake(name, error={"message": "engine failed on: poison"}) for name in "abc"]
    async with running(fakes, tmp_path, policy="round_robin", keys=TENANTS) as on:
        for _ in range(6):
            for more in ({}, {"stream": True}):
                assert (await on.post(PROMPT | {"prompt": "poison"} | more, **ANN))[0] == 500
        assert all(one.breaker.open_until == 0 for one in on.gateway.replicas)
        assert (await on.post(PROMPT, **BOB))[0] == 200
        assert not any("poison" in str(row["error"]) for row in await on.rows())


async def test_when_every_breaker_is_open_requests_are_sent_all_the_same(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path) as on:
        for one in on.gateway.replicas:
            for _ in range(5):
                one.breaker.failed()
            assert not one.sound()
        assert (await on.post(PROMPT))[0] == 200
        assert (await on.get("/health"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_backend_that_is_left_alone_is_asked_where_all_others_fail(tmp_path, stream):
    """It may be well again; the client has nobody else."""
    faults = {"die_after": 2} if stream else {"refuse": 500}
    async with running([Fake("a", **faults), Fake("b", **faults), Fake("c")], tmp_path) as on:
        for _ in range(5):
            on.gateway.replicas[2].breaker.failed()
        if stream:
            assert (await on.stream(PROMPT)).text == WANTED
        else:
            assert (await on.post(PROMPT))[0] == 200


def test_a_breaker_opens_by_the_share_of_failures_and_lets_several_requests_try():
    clock = {"at": 0.0}
    one = Breaker(lambda: clock["at"])
    for number in range(40):
        one.succeeded() if number % 4 else one.failed()
    assert one.allows()  # a quarter
    for _ in range(25):
        one.failed()
    assert not one.allows()
    clock["at"] += replica.OPEN_SECONDS
    one.probing = replica.PROBES - 1
    assert one.allows()
    one.probing += 1
    assert not one.allows()
    one.failed()
    one.probing = 0
    assert not one.allows()
    clock["at"] += replica.OPEN_SECONDS
    one.succeeded()
    assert one.allows()
    for _ in range(LEAST_FAILURES - 1):
        one.failed()
    assert one.allows()
    clock["at"] += replica.WINDOW_SECONDS + 1
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
    async with running([Fake("a", step=5), Fake("b")], tmp_path, limits=quick) as on:
        for _ in range(LEAST_FAILURES + 1):
            status, found, _ = await on.post(PROMPT)
            assert (status, found["error"]["type"]) == (504, "timeout")
        stream = await on.stream(PROMPT)
        assert stream.events[-1]["error"]["code"] == 504
        assert on.fakes["b"].asked == []
        assert on.gateway.replicas[0].sound()
        await until(lambda: on.fakes["a"].running == 0)


async def test_a_backend_of_others_is_looked_at_while_it_is_up(tmp_path):
    async with running([Fake("a")], tmp_path, kinds={"a": "openai"}) as on:
        await on.fakes["a"].stop()
        await until(lambda: on.gateway.replicas[0].state is State.down)


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


async def test_an_address_with_a_path_and_a_query_is_asked_as_azure_is(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "a key")
    more = {"kinds": {"a": "openai"}, "backends": {"a": {"model": "toy", "key_env": "KEY_OF_A"}}}
    async with running([Fake("a", suffix="/openai/deployments/x?api-version=3")], tmp_path, **more) as on:
        assert (await on.post(PROMPT))[1]["choices"][0]["text"] == (await on.stream(PROMPT)).text == WANTED
        assert on.fakes["a"].headers[-1]["api-key"] == "a key"


async def test_a_backend_without_a_list_whose_model_has_no_name_gets_the_name_that_the_client_says(tmp_path):
    more = {"kinds": {"a": "openai"}, "backends": {"a": {"model": "", "serves": ["toy"]}}}
    async with running([Fake("a", suffix="/of/another/path")], tmp_path, **more) as on:
        assert (await on.post(PROMPT))[0] == 200
        assert on.fakes["a"].asked[-1]["model"] == "toy"


async def test_requests_wait_for_a_place_and_each_tenant_has_its_turn(tmp_path):
    full = {"a": {"at_once": 1}}
    patient = replace(QUICK, queue_seconds=20)
    fake, order = Fake("a", go=asyncio.Event()), []
    async with running([fake], tmp_path, backends=full, keys=TENANTS, limits=patient) as on:

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
        fake.go.set()
        await asyncio.gather(first, other, *waiting)
        assert order.index("bob") <= 2
        assert not on.gateway.places.waiting


@pytest.mark.parametrize(
    ("limits", "backends", "said"),
    [
        (replace(QUICK, at_once=1), {}, "too many requests at once"),
        (QUICK, {"a": {"at_once": 1}}, "every backend for this model is full"),
    ],
)
async def test_who_finds_no_place_is_told_when_to_come_again(tmp_path, limits, backends, said):
    fake = Fake("a", go=asyncio.Event())
    async with running([fake], tmp_path, limits=limits, backends=backends) as on:
        busy = asyncio.ensure_future(on.post(PROMPT))
        await until(lambda: on.fakes["a"].running == 1)
        status, found, headers = await on.post(PROMPT)
        assert (status, headers["retry-after"], found["error"]["message"]) == (503, "1", said)
        assert not on.gateway.places.waiting
        async with on.session.get(on.url + "/health") as response:  # whose backends are full, it is healthy
            assert (response.status, (await response.json())["backends"]) == (200, ["a"])
        fake.go.set()
        assert (await busy)[0] == 200


async def test_retry_after_is_honoured_and_handed_on(tmp_path):
    async with running([Fake("a", retry_after="7"), Fake("b", retry_after="7")], tmp_path) as on:
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

        for session in on.gateway.upstream._sessions.values():
            monkeypatch.setattr(session, "request", full)
        for _ in range(5):
            await asyncio.sleep(supervisor.POLL_SECONDS)  # looks fail too
            status, found, headers = await on.post(PROMPT)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "file descriptors" in found["error"]["message"]
        monkeypatch.undo()
        assert on.gateway.replicas[0].breaker.open_until == 0
        assert (await on.post(PROMPT))[0] == 200
