"""The answer cache on a request's way. What it promises is tested beside it."""

import asyncio
import json
import threading

import pytest
from fake import Fake, answer
from running import running

from selfspec_cli.gateway.settings import CacheSettings, LedgerSettings

PROMPT = {"model": "toy", "prompt": "once", "max_tokens": 12, "temperature": 0}
EXACT = CacheSettings(mib=8)


async def test_the_same_request_is_answered_from_the_cache_in_every_form(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        first = await on.stream(PROMPT)
        await on.settled()
        again = await on.stream(PROMPT)
        usage = await on.stream(PROMPT | {"stream_options": {"include_usage": True}})
        status, whole, headers = await on.post(PROMPT)
        assert first.text == again.text == usage.text == whole["choices"][0]["text"] == answer("once", 12)
        assert len(on.fakes["a"].asked) == 1
        assert usage.events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12
        assert "usage" not in again.events[-1] or again.events[-1]["usage"] is None
        assert headers["x-selfspec-cache"].startswith("hit")
        assert status == 200
        rows = await on.rows()
        assert [row["cache"] for row in rows] == ["miss", "hit", "hit", "hit"]
        assert [row["tokens"] for row in rows] == [12] * 4
        assert {row["route"] for row in rows[1:]} == {"cache"}
        assert 'selfspec_gateway_cache_total{verdict="hit"} 3.0' in (await on.get("/metrics"))[1]


async def test_wishes_and_walls(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        wishes = ({}, {"selfspec": {"cache": "none"}}, {"temperature": 1.0}, {"seed": 3}, {"seed": 3})
        for more in wishes:
            await on.post(PROMPT | more)
            await on.settled()
        await on.post({"model": "toy", "input": "x"}, "/v1/embeddings")
        verdicts = [row["cache"] for row in await on.rows()]
        assert verdicts == ["miss", "bypassed", "bypassed", "miss", "hit", "bypassed"]


async def test_plain_requests_of_the_ledger_see_no_cache(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT, ledger=LedgerSettings(plain_share=1.0)) as on:
        for _ in range(2):
            await on.post(PROMPT)
        assert len(on.fakes["a"].asked) == 2


@pytest.mark.parametrize("fault", [{"die_after": 5}, {"error_after": 5}])
async def test_a_broken_answer_is_never_kept(tmp_path, fault):
    async with running([Fake("a", step=0.001, times=1, **fault)], tmp_path, cache=EXACT) as on:
        assert "error" in (await on.stream(PROMPT)).events[-1]
        on.gateway.replicas[0].breaker.reset()
        assert (await on.stream(PROMPT)).text == answer("once", 12)


async def test_an_answer_that_another_backend_continued_is_kept_whole(tmp_path):
    async with running([Fake("a", step=0.001, times=1, die_after=5), Fake("b")], tmp_path, cache=EXACT) as on:
        await on.stream(PROMPT)
        await on.settled()
        assert (await on.stream(PROMPT)).text == answer("once", 12)
        assert (await on.rows())[-1]["cache"] == "hit"


async def test_a_wrong_hit_is_told_and_forgotten(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        await on.post(PROMPT)
        await on.settled()
        _, _, headers = await on.post(PROMPT)
        entry = headers["x-selfspec-cache"].partition("entry=")[2]
        async with on.session.post(f"{on.url}/gateway/feedback", json={"entry": entry, "quality": 0}) as response:
            assert response.status == 200
        await on.post(PROMPT)
        assert [row["cache"] for row in await on.rows()] == ["miss", "hit", "miss"]
        _, _, headers = await on.post(PROMPT)
        entry = headers["x-selfspec-cache"].partition("entry=")[2]
        async with on.session.delete(f"{on.url}/gateway/cache/{entry}") as response:
            assert response.status == 200
        await on.post(PROMPT)
        assert (await on.rows())[-1]["cache"] == "miss"
        assert json.loads((await on.get("/gateway/routes"))[1])["cache"]["entries"] == 1


async def test_a_cache_that_fails_costs_no_request(tmp_path, monkeypatch, capsys):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        monkeypatch.setattr(on.gateway.caching.cache, "lookup", lambda *given: 1 / 0)
        assert (await on.post(PROMPT))[0] == 200
        assert (await on.rows())[0]["cache"] == "failed"
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_an_entry_that_is_not_there_is_told(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        for entry in ("f" * 17, "nonsense", "-1", "1"):
            async with on.session.delete(f"{on.url}/gateway/cache/{entry}") as response:
                assert response.status == 404
                assert (await response.json())["error"]["message"].startswith(f"entry '{entry}' is not in the cache")
            async with on.session.post(f"{on.url}/gateway/feedback", json={"entry": entry, "quality": 1}) as response:
                assert response.status == 404
        async with on.session.post(f"{on.url}/gateway/feedback", json={"quality": 1}) as response:
            assert response.status == 400
            assert "request_id or entry is missing" in (await response.json())["error"]["message"]


async def test_a_cache_whose_file_is_busy_holds_up_nobody(tmp_path):
    async with running([Fake("a")], tmp_path, cache=EXACT) as on:
        free = threading.Event()
        on.gateway.caching._files.submit(free.wait, 20)
        judging = asyncio.ensure_future(
            on.session.post(f"{on.url}/gateway/feedback", json={"entry": "1", "quality": 1})
        )
        await asyncio.sleep(0.1)
        assert (await on.post(PROMPT | {"selfspec": {"cache": "none"}}))[0] == 200
        assert not free.is_set()
        free.set()
        assert (await judging).status == 404


async def test_who_names_a_backend_gets_no_answer_of_another(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path, cache=EXACT) as on:
        for more in ({}, {"backend": "b"}, {"backend": "b", "cache": "exact"}):
            await on.post(PROMPT | {"selfspec": more})
            await on.settled()
        assert [row["route"] for row in await on.rows()] == ["a", "b", "cache"]
