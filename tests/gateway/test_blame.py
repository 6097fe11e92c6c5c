"""Failures are weighed by cause: one client, and one request, never take the others down."""

import asyncio
import errno
from dataclasses import replace

import aiohttp
import pytest
from fake import Fake
from running import ANN, BOB, PROMPT, QUICK, TENANTS, WANTED, running, until

from selfspec_cli.gateway import replica, supervisor
from selfspec_cli.gateway.replica import Breaker, State
from selfspec_cli.gateway.upstream import address


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
    for _ in range(replica.LEAST_FAILURES - 1):
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
        for _ in range(replica.LEAST_FAILURES + 1):
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
