"""The cache as the gateway uses it: what is found, what never is, walls, feedback, size, time, and a kill."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway.cache import AnswerCache, CacheRequest
from selfspec_cli.gateway.cache.embedding import DIMENSIONS
from selfspec_cli.gateway.settings import CacheOptions

SAME = "Which city is the capital of {}?"
OTHER = "What is the capital of {}?"
PLACES = [f"Land{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]


def embed(texts):
    """Texts that share words lie close, those that share a name closest."""
    return [vector_of(text.lower().strip("?").split()) for text in texts]


def vector_of(words):
    seeds = [int.from_bytes(word.encode()[:6], "big") for word in words]
    rows = [np.random.default_rng(seed).standard_normal(DIMENSIONS) for seed in seeds]
    vector = sum(row * (3 if word.startswith("land") else 1) for row, word in zip(rows, words, strict=True))
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def ask(text, **given):
    return CacheRequest(**{"tenant": "t", "model": "m", "endpoint": "/v1/completions", "prompt": text, **given})


def said(text):
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return [json.dumps({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}).encode()]


def text_of(hit):
    return hit.answer["choices"][0]["text"]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name="cache.sqlite", judge=None, **options):
        cache = AnswerCache(tmp_path / name, CacheOptions(**options), judge, embed)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


def run(coroutine):
    return asyncio.run(coroutine)


async def earn(cache, **given):
    """Ask pairs of questions that mean the same until hits by meaning are served; how many were."""
    hits = 0
    for place in PLACES:
        for form in (SAME, OTHER):
            request = ask(form.format(place), wants="meaning", **given)
            hit = await cache.lookup(request)
            if hit is None:
                await cache.store(request, said(place), {})
            else:
                assert (hit.kind, text_of(hit)) == ("meaning", place)
                hits += 1
    return hits


def test_the_same_request_is_a_hit_and_another_is_none(make):
    async def scene():
        cache = make()
        request = ask("Hello", sampling={"temperature": 0})
        assert await cache.lookup(request) is None
        entry = await cache.store(request, said("Hi"), {"usage": {"total_tokens": 3}})
        hit = await cache.lookup(request)
        assert (hit.entry_id, hit.kind, text_of(hit)) == (entry, "exact", "Hi")
        assert hit.answer["usage"] == {"total_tokens": 3}
        for other in (
            replace(request, tenant="u"),
            replace(request, model="n"),
            replace(request, system="Be brief"),
            replace(request, sampling={"temperature": 1}),
            replace(request, prompt="Hello!"),
            replace(request, tools=[{"type": "function"}]),
            replace(request, wants="none"),
        ):
            assert await cache.lookup(other) is None
        events = [event async for event in cache.replay(hit, stream=True)]
        assert events[-1] == b"data: [DONE]\n\n"
        assert (
            json.loads(b"".join([part async for part in cache.replay(hit, stream=False)]))["choices"]
            == hit.answer["choices"]
        )

    run(scene())


@pytest.mark.parametrize(
    ("special", "given"),
    [
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"messages": [{"role": "tool", "content": "5"}], "prompt": None}),
        ("images", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "prompt": None}),
        ("seeds", {"sampling": {"seed": 1}}),
    ],
)
def test_tools_images_and_seeds_are_cached_only_where_asked_for(make, special, given):
    async def scene():
        request = ask("Hello", **given)
        plain, asked = make("plain"), make("asked", also_for=(special,))
        for cache, kept in ((plain, False), (asked, True)):
            assert (await cache.store(request, said("Hi"), {}) is not None) is kept
            assert (await cache.lookup(request) is not None) is kept

    run(scene())


def test_an_answer_that_is_cut_off_or_an_error_is_not_kept(make):
    async def scene():
        cache = make()
        for chunks in ([b'data: {"choices": []}\n\n'], [b'{"error": {}}'], []):
            assert await cache.store(ask("Hello"), chunks, {}) is None
        assert cache.stats()["entries"] == 0 and cache.stats()["not kept"] == 3

    run(scene())


def test_hits_by_meaning_come_after_enough_right_audits_and_not_before(make):
    async def scene():
        cache = make(delta=0.05, seed=1)
        hits = await earn(cache)
        state = cache.stats()["tenants"]["t"]
        assert state["open"] and state["wrong_audits"] == 0
        assert 60 <= state["audits"]
        assert hits > 50
        assert await cache.lookup(ask("Which city is not the capital of Landaa?", wants="meaning")) is None
        assert await cache.lookup(ask(SAME.format("Landaa"), tenant="u", wants="meaning")) is None

    run(scene())


def test_entries_that_are_wrong_are_never_served_however_close(make):
    async def scene():
        cache = make(delta=0.05, seed=1)
        for number, place in enumerate(PLACES):
            for form in (SAME, OTHER):
                request = ask(form.format(place), wants="meaning")
                assert await cache.lookup(request) is None
                await cache.store(request, said(f"{number} {form}"), {})
        assert not cache.stats()["tenants"]["t"]["open"]
        assert cache.stats()["verdicts wrong"] > 100

    run(scene())


def test_exactly_is_all_that_a_client_gets_who_wants_no_more(make):
    async def scene():
        cache = make(delta=0.05, seed=1)
        await earn(cache)
        assert await cache.lookup(ask("Name the capital of Landab?", wants="exact")) is None

    run(scene())


def test_what_was_learnt_survives_closing_and_another_delta_is_earned_anew(make, tmp_path):
    async def scene():
        cache = make(delta=0.05, seed=1)
        await earn(cache)
        before = cache.stats()["tenants"]["t"]
        cache.close()
        again = AnswerCache(tmp_path / "cache.sqlite", CacheOptions(delta=0.05, audit=1e-9), None, embed)
        hit = await again.lookup(ask("Which town is the capital of Landac?", wants="meaning"))
        assert again.stats()["tenants"]["t"] == before
        assert hit is None or text_of(hit) == "Landac"
        again.close()
        stricter = AnswerCache(tmp_path / "cache.sqlite", CacheOptions(delta=0.01), None, embed)
        await stricter.lookup(ask("Which town is the capital of Landac?", wants="meaning"))
        assert not stricter.stats()["tenants"]["t"]["open"]
        stricter.close()

    run(scene())


def test_complaints_raise_an_entrys_threshold_and_close_the_cache(make):
    async def scene():
        cache = make(delta=0.05, seed=1, audit=1e-9)
        await earn(cache)
        served = 0
        for place in PLACES:
            hit = await cache.lookup(ask(f"What city is the capital of {place}?", wants="meaning"))
            if hit is None:
                continue
            served += 1
            cache.feedback(hit.entry_id, right=False)
            if not cache.stats()["tenants"]["t"]["open"]:
                break
        assert 1 <= served <= 10
        assert not cache.stats()["tenants"]["t"]["open"]

    run(scene())


def test_a_wrong_answer_to_the_same_request_is_evicted(make):
    async def scene():
        cache = make()
        await cache.store(ask("Hello"), said("Hi"), {})
        hit = await cache.lookup(ask("Hello"))
        cache.feedback(hit.entry_id, right=True)
        assert await cache.lookup(ask("Hello")) is not None
        cache.feedback(hit.entry_id, right=False)
        assert await cache.lookup(ask("Hello")) is None
        assert not cache.evict(hit.entry_id) and not cache.evict("no id")

    run(scene())


def test_a_judge_compares_in_idle_time_and_what_it_cannot_say_counts_for_nothing(make):
    async def scene():
        asked, verdicts = [], iter([None, True, False])

        async def judge(question, cached, fresh):
            asked.append((question, cached, fresh))
            return next(verdicts)

        cache = make(judge=judge)
        await cache.lookup(ask(SAME.format("Landaa"), wants="meaning"))
        await cache.store(ask(SAME.format("Landaa"), wants="meaning"), said("A city"), {})
        for form in ("What is the capital of {}?", "Name the capital of {}?", "Tell the capital of {}?"):
            request = ask(form.format("Landaa"), wants="meaning")
            assert await cache.lookup(request) is None
            await cache.store(request, said("The city A"), {})
        assert cache.stats()["waiting_verdicts"] == 3 and not asked
        assert await cache.settle(most=1) == 1 and cache.stats()["verdicts missing"] == 1
        assert await cache.settle(most=5) == 2 and cache.stats()["waiting_verdicts"] == 0
        assert asked[0][1:] == ("A city", "The city A")
        assert (cache.stats()["verdicts right"], cache.stats()["verdicts wrong"]) == (1, 1)
        assert cache.stats()["vectors"] == 2  # the first question, and the one whose answer was another

    run(scene())


def test_time_to_live_and_size(make):
    async def scene():
        cache = make(ttl_s=10, entries=100)
        for number in range(250):
            await cache.store(ask(f"Question {number}", now=float(number) / 1000), said("x"), {})
        assert cache.stats()["entries"] <= 100
        assert await cache.lookup(ask("Question 249", now=1.0)) is not None
        assert await cache.lookup(ask("Question 0", now=1.0)) is None
        assert await cache.lookup(ask("Question 249", now=11.0)) is None
        small = make("small", mib=0.01)
        for number in range(100):
            await small.store(ask(f"Question {number}"), said("x" * 500), {})
        assert 0 < small.stats()["bytes"] <= 0.01 * 2**20

    run(scene())


def test_a_second_process_and_a_foreign_file_are_refused_by_name(make, tmp_path):
    make()
    with pytest.raises(SettingsError, match="one process at a time"):
        AnswerCache(tmp_path / "cache.sqlite", CacheOptions())
    (tmp_path / "other").write_text("no database " * 100)
    with pytest.raises(SettingsError, match="no cache's file"):
        AnswerCache(tmp_path / "other", CacheOptions())
    sqlite3.connect(tmp_path / "later").execute("PRAGMA user_version=99")
    with pytest.raises(SettingsError, match="version 99"):
        AnswerCache(tmp_path / "later", CacheOptions())


WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_answers import ask, embed, said
from pathlib import Path
from selfspec_cli.gateway.cache import AnswerCache
from selfspec_cli.gateway.settings import CacheOptions

async def main():
    cache = AnswerCache(Path(sys.argv[1]), CacheOptions(), None, embed)
    for number in range(10**6):
        request = ask(f"Question {number}", wants="meaning")
        if await cache.lookup(request) is None:
            await cache.store(request, said(str(number) * 200), {})
        print(number, flush=True)

asyncio.run(main())
"""


def killed_after(path, entries):
    """A process that writes entries until it is killed; the last entry that it said was stored."""
    command = [sys.executable, "-c", WRITER, str(path), os.path.dirname(__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        done = next(int(line) for line in writer.stdout if int(line) >= entries)
        time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return done


async def all_there(path, entries):
    cache = AnswerCache(path, CacheOptions(), None, embed)
    for number in range(entries):
        hit = await cache.lookup(ask(f"Question {number}"))
        assert text_of(hit) == str(number) * 200
    assert cache.stats()["vectors"] >= entries  # numbers differ, so every question is an entry of its own
    cache.close()


def test_a_kill_in_the_middle_of_writing_leaves_whole_entries_and_the_index_is_built_again(tmp_path):
    path = tmp_path / "cache.sqlite"
    for entries in (40, 80, 120):
        run(all_there(path, killed_after(path, entries) + 1))
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_same_question_at_the_same_time_is_still_found_by_meaning(make):
    cache, request = make(), ask(SAME.format("Landaa"), wants="meaning")

    async def twice():
        for _ in range(2):
            assert await cache.lookup(request) is None
        return [await cache.store(request, said(text), {}) for text in ("first", "second")]

    first, second = run(twice())
    assert first == second
    assert (cache.stats()["entries"], cache.stats()["vectors"]) == (1, 1)
    assert text_of(run(cache.lookup(request))) == "first"
