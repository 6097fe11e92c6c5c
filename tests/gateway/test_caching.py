"""The answer cache on a request's way. What it promises is tested beside it."""

import asyncio
import json
import threading

import pytest
from fake import Fake, answer
from running import ANN, BOB, DIGESTS, ONCE, TENANTS, running, until

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway.cache import AnswerCache, key
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import CacheSettings, KeySettings, LedgerSettings

EXACT = CacheSettings(mib=8)


async def test_the_same_request_is_answered_from_the_cache_in_every_form(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        first = await on.stream(ONCE)
        await on.settled()
        again = await on.stream(ONCE)
        usage = await on.stream(ONCE | {"stream_options": {"include_usage": True}})
        status, whole, headers = await on.post(ONCE)
        assert first.text == again.text == usage.text == whole["choices"][0]["text"] == answer("once", 12)
        assert len(on.fakes["a"].asked) == 1
        assert usage.events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12
        assert whole["usage"]["total_tokens"] == 16
        assert "usage" not in again.events[-1] or again.events[-1]["usage"] is None
        assert headers["x-selfspec-cache"].startswith("hit")
        assert status == 200
        rows = await on.rows()
        assert [row["cache"] for row in rows] == ["miss", "hit", "hit", "hit"]
        assert [row["tokens"] for row in rows] == [12] * 4
        assert {row["route"] for row in rows[1:]} == {"cache"}
        assert 'selfspec_gateway_cache_total{verdict="hit"} 3.0' in (await on.get("/metrics"))[1]


@pytest.mark.parametrize(("also", "sampled"), [([], ["bypassed"] * 2), (["sampled"], ["miss", "hit"])])
async def test_wishes_and_walls(tmp_path, also, sampled):
    """Null is no temperature, as if none were named."""
    async with running([Fake("a")], tmp_path, cache=CacheSettings(mib=8, also_for=also)) as on:
        seeded, hot = {"seed": 3}, {"temperature": None}
        for more in ({}, {"selfspec": {"cache": "none"}}, seeded, seeded, hot, hot):
            await on.post(ONCE | more)
            await on.settled()
        await on.post({"model": "toy", "input": "x"}, "/v1/embeddings")
        verdicts = [row["cache"] for row in await on.rows()]
        assert verdicts == ["miss", "bypassed", "miss", "hit", *sampled, "bypassed"]


async def test_plain_requests_of_the_ledger_see_no_cache(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT, ledger=LedgerSettings(plain_share=1.0)) as on:
        for _ in range(2):
            await on.post(ONCE)
        assert len(on.fakes["a"].asked) == 2


@pytest.mark.parametrize("fault", [{"die_after": 5}, {"garbage_after": 5, "garbage": b'data: {"error": "no"}\n\n'}])
async def test_a_broken_answer_is_never_kept(tmp_path, fault):
    async with running([Fake("a", step=0.001, times=1, **fault)], tmp_path, cache=EXACT) as on:
        assert "error" in (await on.stream(ONCE)).events[-1]
        on.gateway.replicas[0].breaker.reset()
        assert (await on.stream(ONCE)).text == answer("once", 12)


async def test_a_wrong_hit_is_told_and_forgotten(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        await on.post(ONCE)
        await on.settled()
        _, _, headers = await on.post(ONCE)
        entry = headers["x-selfspec-cache"].partition("entry=")[2]
        assert (await on.judge(0, entry=entry))[0] == 200
        await on.post(ONCE)
        assert [row["cache"] for row in await on.rows()] == ["miss", "hit", "miss"]
        _, _, headers = await on.post(ONCE)
        entry = headers["x-selfspec-cache"].partition("entry=")[2]
        assert (await on.post({}, f"/gateway/cache/{entry}", "DELETE"))[0] == 200
        await on.post(ONCE)
        assert (await on.rows())[-1]["cache"] == "miss"
        assert json.loads((await on.get("/gateway/routes"))[1])["cache"]["entries"] == 1


async def test_a_cache_that_fails_costs_no_request(tmp_path, monkeypatch, capsys):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        monkeypatch.setattr(on.gateway.caching.cache, "lookup", lambda *given: 1 / 0)
        assert (await on.post(ONCE))[0] == 200
        assert (await on.rows())[0]["cache"] == "failed"
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_an_entry_that_is_not_there_is_told(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        for entry in ("f" * 17, "nonsense", "-1", "1"):
            status, found, _ = await on.post({}, f"/gateway/cache/{entry}", "DELETE")
            assert status == 404
            assert found["error"]["message"].startswith(f"entry '{entry}' is not in the cache")
            assert (await on.judge(1, entry=entry))[0] == 404
        status, found, _ = await on.judge(1)
        assert (status, "request_id or entry is missing" in found["error"]["message"]) == (400, True)


async def test_a_cache_whose_file_is_busy_holds_up_nobody(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        free = threading.Event()
        on.gateway.caching._files.submit(free.wait, 20)
        judging = asyncio.ensure_future(on.judge(1, entry="1"))
        await asyncio.sleep(0.1)
        assert (await on.post(ONCE | {"selfspec": {"cache": "none"}}))[0] == 200
        assert not free.is_set()
        free.set()
        assert (await judging)[0] == 404


async def test_who_names_a_backend_gets_no_answer_of_another(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path, cache=EXACT) as on:
        for more in ({}, {"backend": "b"}, {"backend": "b", "cache": "exact"}):
            await on.post(ONCE | {"selfspec": more})
            await on.settled()
        assert [row["route"] for row in await on.rows()] == ["a", "b", "cache"]


async def test_equal_requests_at_once_share_one_call(tmp_path):
    async with running([Fake("a", step=0.02)], tmp_path, cache=EXACT) as on:
        texts = await asyncio.gather(*(on.stream(ONCE) for _ in range(9)), on.post(ONCE), on.post(ONCE))
        assert {one.text for one in texts[:9]} == {answer("once", 12)}
        assert {one[1]["choices"][0]["text"] for one in texts[9:]} == {answer("once", 12)}
        assert len(on.fakes["a"].asked) == 2  # one of them streamed
        rows = await on.rows()
        assert sorted(row["cache"] for row in rows) == ["miss"] * 2 + ["shared"] * 9
        assert {(row["status"], row["tokens"]) for row in rows} == {(200, 12)}


async def test_a_shared_call_goes_on_when_its_first_client_leaves_and_ends_when_all_do(tmp_path):
    async with running([Fake("a", step=0.05)], tmp_path, cache=EXACT) as on:
        first = asyncio.ensure_future(on.stream(ONCE))
        await until(lambda: on.gateway.caching.flights)
        second = asyncio.ensure_future(on.stream(ONCE))
        await asyncio.sleep(0.2)
        first.cancel()
        assert (await second).text == answer("once", 12)
        assert len(on.fakes["a"].asked) == 1
        alone = asyncio.ensure_future(on.stream(ONCE | {"prompt": "twice"}))
        await until(lambda: on.gateway.caching.flights)
        await asyncio.sleep(0.1)
        alone.cancel()
        await until(lambda: not on.gateway.caching.flights and not on.fakes["a"].running)


async def test_a_shared_call_that_fails_fails_for_each_with_one_error(tmp_path):
    async with running([Fake("a", step=0.02, die_after=5)], tmp_path, cache=EXACT) as on:
        for stream in await asyncio.gather(*(on.stream(ONCE) for _ in range(3))):
            assert [("error" in event) for event in stream.events].count(True) == 1
            assert "error" in stream.events[-1]
        on.fakes["a"].refuse = 400
        assert {one[0] for one in await asyncio.gather(*(on.post(ONCE) for _ in range(3)))} == {400}
        assert not on.gateway.caching.flights


async def test_a_tenant_judges_and_sees_its_own_entries_alone(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT, keys=TENANTS) as on:
        await on.post(ONCE, **ANN)
        await on.settled()
        assert "x-selfspec-cache" not in (await on.post(ONCE, **BOB))[2]
        entry = (await on.post(ONCE, **ANN))[2]["x-selfspec-cache"].partition("entry=")[2]
        for who, quality, status in ((BOB, 0, 404), (BOB, 1, 404), (ANN, 1, 200), (ANN, 0, 200), (ANN, 0, 404)):
            assert (await on.judge(quality, who, entry=entry))[0] == status


def test_the_file_forgets_what_is_old_and_what_was_used_longest_ago(tmp_path):
    cache = AnswerCache(tmp_path / "answers.sqlite")
    answer = {"text": "x" * 1000}
    for number in range(10):
        cache.store(bytes([number]), "t", answer, 100.0 + number, most=10**6, oldest=0)
    assert cache.lookup(bytes([0]), 200.0, oldest=0)[1] == answer
    cache.store(b"new", "t", answer, 201.0, most=5 * 1300, oldest=0)
    kept = [number for number in range(10) if cache.lookup(bytes([number]), 202.0, oldest=0)]
    assert 0 in kept and 1 not in kept and cache.size()["bytes"] <= 5 * 1300
    assert cache.size()["entries"] == len(kept) + 1
    assert cache.lookup(b"new", 300.0, oldest=202.0) is None
    cache.store(b"other", "t", answer, 300.0, most=10**6, oldest=299.0)
    assert cache.size()["entries"] == 1
    again = AnswerCache(tmp_path / "answers.sqlite")  # another process
    cache.close()
    assert (again.size()["entries"], again.lookup(b"other", 301.0, oldest=0)[1]) == (1, answer)
    again.close()
    (tmp_path / "other").write_bytes(b"no database" * 100)
    with pytest.raises(SettingsError):
        AnswerCache(tmp_path / "other")


def test_requests_that_differ_in_what_shapes_the_answer_have_keys_of_their_own():
    one = Request("/v1/completions", ONCE, tenant="ann")
    same = Request("/v1/completions", ONCE | {"stream": True, "user": "x"}, tenant="ann")
    assert key(one) == key(same)
    changes = ({"prompt": "Once"}, {"max_tokens": 13}, {"stop": ["x"]}, {"seed": 2**70}, {"model": "b"})
    others = [Request("/v1/completions", ONCE | more, tenant="ann") for more in changes]
    others += [Request("/v1/completions", ONCE, tenant="bob"), Request("/v1/chat/completions", ONCE, tenant="ann")]
    assert len({key(one), *map(key, others)}) == 8


# ---- Answers that clients judge: the policy `quality` learns from them


async def test_a_tenant_judges_its_own_requests_alone(tmp_path):
    """Two tenants give their requests the same id."""
    keys = [KeySettings(name, DIGESTS[name]) for name in ("ann", "bob", "eve")]
    async with running([Fake("a"), Fake("b")], tmp_path, policy="quality", keys=keys) as on:
        for name, backend in (("ann", "a"), ("bob", "b")):
            head = {"Authorization": f"Bearer {name}", "X-Request-Id": "1"}
            await on.post(COMPLETION | {"selfspec": {"backend": backend}}, **head)
        await on.settled()
        for name, status in (("ann", 200), ("eve", 404)):
            assert (await on.judge(0, {"Authorization": f"Bearer {name}"}, request_id="1"))[0] == status
        assert list(on.gateway.routing.choosers["quality"].judged) == ["a"]


COMPLETION = {"model": "toy", "prompt": "an easy one", "max_tokens": 5}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "an easy one"}], "max_tokens": 5}


@pytest.mark.parametrize("body", [COMPLETION, CHAT])
async def test_a_cascade_asks_the_dear_model_where_the_cheap_one_is_not_sure(tmp_path, body):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    hard = json.loads(json.dumps(body).replace("easy", "hard"))
    backends = {"large": {"price_out": 10.0}, "small": {"price_out": 1.0}}
    fakes = [Fake("large"), Fake("small", unsure=-1.0)]
    async with running(fakes, tmp_path, policy="cascade", backends=backends) as on:
        easy, asked_for = await on.post(body, path), await on.post(body | {"logprobs": 1}, path)
        difficult, stream = await on.post(hard, path), await on.stream(hard, path)
        assert [easy[2]["x-selfspec-backend"], difficult[2]["x-selfspec-backend"]] == ["small", "large"]
        assert stream.headers["x-selfspec-backend"] == "large"
        assert easy[1]["choices"][0]["logprobs"] is None  # the client has not asked for them
        assert asked_for[1]["choices"][0]["logprobs"]
        rows = await on.rows()
        assert [row["reason"] for row in rows] == ["cascade", "cascade", "cascade_unsure", "dearest"]
        assert rows[2]["tried"] == ["small"]
        assert rows[2]["cost"] > rows[3]["cost"] > rows[0]["cost"]  # both were paid
        assert not on.gateway.replicas[1].breaker.outcomes or on.gateway.replicas[1].breaker.open_until == 0
