"""The parts of the gateway one by one: batches, the ledger, predictions, what a server says of itself, events."""

import asyncio
import json
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from fake import Fake
from running import ONCE, running, started, until
from simulated import begun

from selfspec_cli.gateway import demo, routing
from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.continuation import Answer, Way, by_ids
from selfspec_cli.gateway.limits import DAY, Meter
from selfspec_cli.gateway.replica import Load, Replica, State, between, read
from selfspec_cli.gateway.request import Request, RequestLog
from selfspec_cli.gateway.routing import Batch, Places
from selfspec_cli.gateway.settings import BackendSettings, KeySettings, LedgerSettings
from selfspec_cli.gateway.timing import FEW, Curve, Timing
from selfspec_cli.gateway.wire import GatewayError
from selfspec_cli.record.gateway_log import Ledger

# ---- continuations ---------------------------------------------------------------------------------------------------


def chat(*parts, **more):
    body = {"model": "toy", "messages": [{"role": "user", "content": list(parts)}], "stream": True, **more}
    return requests.read(requests.CHAT, json.dumps(body).encode(), {})


def test_a_chat_with_a_picture_is_not_continued_by_token_ids():
    """The ids say only where the picture stood."""
    text, picture = {"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "data:x"}}
    assert by_ids(chat(text), vllm=True)
    assert not by_ids(chat(text, picture), vllm=True)
    assert Answer(chat(text, picture)).next_way() is None
    assert Answer(chat(text, picture, temperature=0)).next_way() is Way.again


@pytest.mark.parametrize(
    ("prompt", "answers"), [("x", 1), ([1, 2], 1), (["x"], 1), ([[1, 2]], 1), (["x", "y"], 2), ([[1], [2]], 2)]
)
def test_one_answer_is_continued_and_several_are_not(prompt, answers):
    body = json.dumps({"prompt": prompt, "n": None, "stream": True, "temperature": 0}).encode()
    request = requests.read(requests.COMPLETIONS, body, {})
    assert request.answers == answers
    assert by_ids(request, vllm=True) == (answers == 1)
    assert Answer(request).next_way() is (Way.again if answers == 1 else None)


def test_a_limit_that_is_null_is_none():
    text = {"type": "text", "text": "x"}
    assert chat(text, max_tokens=7, max_completion_tokens=None).most_tokens == 7
    assert chat(text, max_tokens=7, max_completion_tokens=5).most_tokens == 5
    assert chat(text).most_tokens is None


# ---- class batch -----------------------------------------------------------------------------------------------------


async def test_a_batch_waits_for_an_idle_backend_and_interactive_requests_do_not(tmp_path):
    priority = {"words": ["--", "--scheduling-policy=priority"]}
    async with running([Fake("a", step=0.03)], tmp_path, backends={"a": priority}) as on:
        order = []

        async def one(name, **wishes):
            assert (await on.post(ONCE | {"selfspec": wishes}))[0] == 200
            order.append(name)

        first = asyncio.ensure_future(one("first"))
        await asyncio.sleep(0.1)
        late = [asyncio.ensure_future(one("batch", **{"class": "batch"})) for _ in range(2)]
        await until(lambda: len(on.gateway.batch.waiting) == 2)
        async with on.session.get(on.url + "/metrics") as response:
            assert 'selfspec_gateway_queue{class="batch"} 2.0' in await response.text()
        second = asyncio.ensure_future(one("second"))
        await asyncio.gather(first, second, *late)
        assert order == ["first", "second", "batch", "batch"]
        assert [asked["priority"] for asked in on.fakes["a"].asked] == [0, 0, 10, 10]
        rows = {row["class"]: row for row in await on.rows()}
        assert rows["batch"]["reason"] == "first_idle"
        assert rows["batch"]["waited_ms"] > 100
        assert rows["interactive"]["waited_ms"] is None


async def test_a_batch_for_one_backend_does_not_go_because_another_one_idles(tmp_path):
    async with running([Fake("a"), Fake("b", step=0.03)], tmp_path) as on:
        busy = asyncio.ensure_future(on.post(ONCE | {"selfspec": {"backend": "b"}}))
        await until(lambda: on.fakes["b"].running == 1)
        await on.post(ONCE | {"max_tokens": 1, "selfspec": {"backend": "b", "class": "batch"}})
        await busy
        assert [(row["class"], row["route"]) for row in await on.rows()] == [("interactive", "b"), ("batch", "b")]


async def test_of_requests_that_wait_the_one_whose_deadline_comes_first_goes_first():
    """The first one named a later deadline than the one that the second has by the settings."""
    one = Replica(BackendSettings(name="a"), state=State.up)
    batch, went = Batch(lambda asked: [one]), []

    async def wait(name, deadline):
        asked = Request("/v1/completions", {})
        asked.deadline = deadline and asked.began + deadline
        await batch.wait(asked)
        went.append(name)

    number = one.begin(Request("/v1/completions", {}))
    waiting = [asyncio.ensure_future(wait("named", 300)), asyncio.ensure_future(wait("by the settings", None))]
    await asyncio.sleep(0)
    one.end(number, None)
    for _ in waiting:
        batch.look()
        await asyncio.sleep(0.01)
    assert went == ["by the settings", "named"]


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    log = RequestLog(tmp_path / "gone" / "log.jsonl")
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        log.add({"id": "x"})
    log.close()
    assert capsys.readouterr().err.count("\nFileNotFoundError") == 1


@pytest.mark.parametrize(("enough", "deadline", "why"), [(3, 30_000, "first_enough"), (100, 250, "first_deadline")])
async def test_a_batch_goes_when_enough_wait_and_when_its_deadline_comes(tmp_path, monkeypatch, enough, deadline, why):
    monkeypatch.setattr(routing, "ENOUGH", enough)
    async with running([Fake("a", step=0.2)], tmp_path) as on:
        busy = asyncio.ensure_future(on.post(ONCE | {"max_tokens": 8}))
        await asyncio.sleep(0.1)
        wishes = {"selfspec": {"class": "batch", "deadline_ms": deadline}}
        await asyncio.gather(*(on.post(ONCE | {"max_tokens": 1} | wishes) for _ in range(3)))
        await busy
        assert {row["reason"] for row in await on.rows() if row["class"] == "batch"} == {why}


def waiting_request():
    return SimpleNamespace(tenant="t", deadline=None, began=time.monotonic())


async def test_a_request_whose_place_was_taken_keeps_its_turn():
    room = []
    places = Places(lambda request: bool(room))
    first, second = (asyncio.ensure_future(places.wait(waiting_request(), 5.0)) for _ in range(2))
    await asyncio.sleep(0)
    room.append("place")
    places.look()  # it is the first one's turn
    room.clear()  # and somebody else is faster
    await asyncio.sleep(0)
    room.append("place")
    places.look()
    assert await first
    assert not second.done() and len(places) == 1
    second.cancel()


@pytest.mark.parametrize("queue", [Places, Batch])
async def test_a_client_that_leaves_as_its_turn_comes_has_left(queue):
    idle = SimpleNamespace(name="a", running=list)
    room = []
    waits = queue(lambda request: [idle] if room else [])
    leaving = asyncio.ensure_future(waits.wait(waiting_request(), *([5.0] if queue is Places else [])))
    await asyncio.sleep(0)
    room.append("place")
    waits.look()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not waits.waiting


# ---- the ledger ------------------------------------------------------------------------------------------------------


async def test_some_requests_go_the_plain_way_and_the_ledger_compares(tmp_path):
    metrics = "vllm:spec_decode_num_drafts_total 0\nvllm:num_requests_running 0\n"
    fakes = [Fake("slow", step=0.004, metrics=metrics), Fake("fast", step=0.0005)]
    more = {"backends": {"slow": {"price_hour": 3600.0}, "fast": {"price_out": 1.0}}}
    ledger = LedgerSettings(plain_share=0.4)
    async with running(fakes, tmp_path, ledger=ledger, policy_options={"fixed": {"backend": "fast"}}, **more) as on:
        await asyncio.sleep(0.1)  # a look at /metrics tells that the first one can draft
        for _ in range(30):
            await on.stream(ONCE)
        rows = await on.rows()
        plain = [row for row in rows if row["plain"]]
        assert 5 < len(plain) < 20
        assert {row["route"] for row in plain} == {"slow"}
        assert {row["route"] for row in rows if not row["plain"]} == {"fast"}
        asked = on.fakes["slow"].asked
        assert all(one["vllm_xargs"] == {"selfspec_k": 0} for one in asked)
        assert all("vllm_xargs" not in one for one in on.fakes["fast"].asked)
        gains = {(one.route, one.of): one for one in on.gateway.ledger.gains()}
        assert gains["fast", "seconds"].low > 1
        assert gains["fast", "money"].gain > 100
        assert gains["fast", "seconds"].plain_requests == len(plain)
        shown = json.loads((await on.get("/gateway/routes"))[1])["gains"]
        assert {one["route"] for one in shown} == {"fast", "all"}


def test_a_gain_has_an_interval_and_what_was_not_measured_has_none():
    ledger, draw = Ledger(), random.Random(0)
    for number in range(400):
        plain = number % 4 == 0
        ms = draw.lognormvariate(0, 0.3) * (100 if plain else 50)
        ledger.add({"status": 200, "plain": plain, "route": "a", "tokens": 10, "e2e_ms": ms, "cost": None})
    route, all_routes = ledger.gains()
    assert (route.route, all_routes.route, route.of) == ("a", "all", "seconds")
    assert route.low < 2.0 < route.high
    assert route.high - route.low < 0.5
    few = Ledger()
    few.add({"status": 200, "plain": False, "route": "a", "tokens": 10, "e2e_ms": 1.0})
    few.add({"status": 502, "plain": True, "route": "a", "tokens": 10, "e2e_ms": 1.0})
    for _ in range(3):
        few.add({"status": 200, "plain": False, "route": "a", "tokens": 1, "e2e_ms": 1, "reason": "asked_for"})
    assert [one.requests for one in few.gains()] == [1, 1]
    assert {one.gain for one in few.gains()} == {None}


def test_a_route_is_the_requests_that_ended_well_and_nothing_that_was_not_measured():
    asked = dict.fromkeys((*demo.TIMES, *demo.SUMS)) | {"tokens": 1000, "e2e_ms": 100.0, "cost": 1.0, "cache": "hit"}
    asked |= {"model": "m", "route": "a", "status": 200, "plain": False}
    rows = [asked, asked | {"e2e_ms": 300.0}, asked | {"e2e_ms": 200.0}, asked | {"plain": True, "cost": None}]
    routed, plain = demo.routes([*rows, asked | {"status": 502}, asked | {"route": None}])
    wanted = {"requests": 3, "hits": 3, "tokens": 3000, "e2e_ms": 200.0, "cost": 3.0, "ttft_ms": None}
    assert wanted.items() <= routed.items()
    assert {"plain": True, "requests": 1, "cost": None}.items() <= plain.items()


def test_a_hit_costs_nothing_and_counts_for_all_routes():
    ledger = Ledger()
    asked = (True, "a", 2.0), (True, "a", 2.0), (False, "a", 2.0), (False, "cache", None), (False, "cache", None)
    for plain, route, cost in asked:
        row = {"status": 200, "plain": plain, "route": route, "tokens": 1, "e2e_ms": 1.0, "cost": cost}
        ledger.add(row | {"cache": "hit" if route == "cache" else "miss"})
    gains = {(one.route, one.of): one.gain for one in ledger.gains()}
    assert gains["all", "money"] == pytest.approx(3.0)
    assert gains["cache", "money"] is None


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_times_are_learnt_and_followed_when_they_change():
    timing, draw = Timing(), random.Random(1)
    assert timing.steps.value(1) is None and timing.ttft.value((1, 10, 0)) is None
    for _ in range(300):
        running_now, own, ahead = draw.randint(1, 16), draw.randint(10, 2000), draw.choice([0, 0, 500])
        timing.steps.learn(running_now, 0.010 + 0.001 * running_now)
        timing.learn_ttft(own, ahead, 0.02 + (own + ahead) / 4000)
    assert timing.steps.value(8) == pytest.approx(0.018, rel=0.03)
    assert timing.ttft.value((1, 1000, 500)) == pytest.approx(0.02 + 1500 / 4000, rel=0.02)
    assert timing.prefill_rate == pytest.approx(4000, rel=0.2)
    for _ in range(200):
        running_now = draw.randint(1, 16)
        timing.steps.learn(running_now, 0.020 + 0.002 * running_now)
    assert timing.steps.value(8) == pytest.approx(0.036, rel=0.05)


def test_a_curve_goes_through_what_was_measured_and_never_falls():
    curve = Curve()
    for running_now, seconds in ((1, 0.01), (4, 0.02), (4, 0.02)):
        curve.learn(running_now, seconds)
    assert [curve.value(one) for one in (0, 1, 4)] == pytest.approx([0.01, 0.01, 0.02])
    assert curve.value(2) == pytest.approx(0.02 * 2**-0.5)
    assert curve.value(16) == pytest.approx(0.04)  # its line goes on
    curve.learn(8, 0.015)  # less for more requests: the point at four is out of date
    assert curve.value(4) == pytest.approx(0.015)
    curve.learn(2, 0.05)
    assert min(curve.value(one) for one in (2, 4, 8, 20)) == pytest.approx(0.05)


def test_what_a_server_says_of_itself():
    text = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        "vllm:num_requests_waiting 1\nvllm:prefix_cache_queries_total 0.0\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 10.0\nvllm:spec_decode_num_accepted_tokens_total 25.0\n'
        "vllm:selfspec_draft_rounds_total 10\nvllm:selfspec_draft_steps_total 40\nvllm:selfspec_draft_cost 0.2\n"
        'vllm:other{a="b"} 7\n'
    )
    load = between(None, read(text), Load())
    assert (load.running, load.waiting, load.known, load.drafts, load.caches) == (5, 1, True, True, False)
    assert (load.tokens, load.work) == (3.5, pytest.approx(1.8))
    same = between(read(text), read(text), load)
    assert (same.tokens, same.work) == (load.tokens, load.work)  # no round ended: nothing new is known
    one = Replica(BackendSettings(name="a"), load=load, counts={"drafts": 10, "accepted": 25})
    one.looked(one.look(), {"drafts": 12, "accepted": 31})
    assert one.load.tokens == pytest.approx(1 + 31 / 12)  # two rounds that brought more, after ten
    one.looked(one.look(), {"drafts": 212, "accepted": 31})
    assert one.load.tokens == 1.0  # so the acceptance of a busy server is followed at once
    one.load = load
    one.came_up()  # the server was started anew, and warmed up
    anew = between({"drafts": 100, "accepted": 250}, {"running": 0, "drafts": 10, "accepted": 0}, one.load)
    assert anew.tokens == 1.0
    assert not between(None, read("nothing\n"), Load()).known
    for wrong in ("NaN", "-7", "1e999", "abc", ""):  # is no count, and none that a request could fail of
        assert read(f"vllm:num_requests_running {wrong}\nvllm:num_requests_waiting 2\n") == {"waiting": 2}


def test_what_a_server_expects_of_its_next_step_is_learnt():
    """It says what a round takes; a plain step takes as much less as a round costs more."""
    one = Replica(BackendSettings(name="a"), state=State.up)
    text = 'vllm:num_requests_running{engine="0"} 4\nvllm:selfspec_expected_step_seconds{engine="0"} 0.03\n'
    one.load = Load(work=1.5, tokens=2.0)
    for _ in range(FEW):
        one.looked(one.look(), read(text))
    assert one.timing.steps.value(4) == pytest.approx(0.02)
    for not_now in (text.replace("} 4", "} 0"), f"{text}vllm:selfspec_draft_length 0\n"):  # idle; a step, and no round
        one.load = Load()
        one.looked(one.look(), read(not_now))
    assert one.timing.steps.value(4) == pytest.approx(0.02)


def test_requests_that_come_while_a_backend_is_looked_at_are_not_those_of_others():
    one = Replica(BackendSettings(name="a"), state=State.up)
    asked = Request("/v1/completions", {"prompt": "x"})
    numbers = [one.begin(asked)]
    before = one.look()
    numbers += [one.begin(asked), one.begin(asked)]
    one.looked(before, {"running": 3.0})
    assert one.running() == 3
    for number in numbers:
        one.end(number, None)
    assert one.running() == 0
    one.looked(one.look(), {"running": 3.0})
    assert one.running() == 3  # these are others'


def test_the_time_of_a_machine_is_shared_by_the_requests_on_it():
    clock = {"at": 0.0}
    one = Replica(BackendSettings(name="a"), state=State.up, now=lambda: clock["at"])
    asked = Request("/v1/completions", {"prompt": "x"})
    first = one.begin(asked)
    clock["at"] = 2.0
    second = one.begin(asked)
    clock["at"] = 6.0
    assert one.end(second, None) == pytest.approx(2.0)  # four seconds, for two
    clock["at"] = 7.0
    assert one.end(first, None) == pytest.approx(2.0 + 2.0 + 1.0)


def test_the_time_between_events_is_learnt_while_answers_are_under_way():
    """Four choices send four times as many events; what a client has no room for is not the backend's time."""
    clock = {"at": 0.0}
    one = Replica(BackendSettings(name="a"), state=State.up, now=lambda: clock["at"])
    single, several = (begun(one, Request("/v1/completions", {"prompt": "x", "n": n}), 0.1) for n in (1, 4))
    for _ in range(20):
        clock["at"] += 0.1
        single.came(1)
        several.came(4)
    assert one.timing.steps.value(2) == pytest.approx(0.1)
    one.end(several, None)
    for _ in range(20):
        single.held = 0.95
        clock["at"] += 1.0
        single.came(1)
    assert one.timing.steps.value(1) == pytest.approx(0.05)


# ---- small parts -----------------------------------------------------------------------------------------------------


def waits(meter, limits):
    """Seconds after which a request may come again; 0 for one that came in, and has ended."""
    try:
        meter.enter(limits)
    except GatewayError as refused:
        return int(refused.headers["retry-after"])
    return 0


def test_what_a_key_may_use_comes_back_as_time_goes_and_is_shared_by_files(tmp_path):
    clock = {"at": 5 * DAY}
    one, other = (Meter(tmp_path / "limits", lambda: clock["at"]) for _ in range(2))
    limits = KeySettings("ann", "a" * 64, requests_per_minute=60, tokens_per_minute=600, money_per_day=5.0)
    for meter in (one, other) * 30:
        assert waits(meter, limits) == 0
        meter.leave(limits, 1, 0.01)
    assert waits(one, limits) == waits(other, limits) == 1
    clock["at"] += 1.1
    assert waits(one, limits) == 0
    one.leave(limits, 2000, 0.0)  # an answer was longer than what was left
    clock["at"] += 10
    assert waits(other, limits) > 100
    clock["at"] += 600
    assert waits(other, limits) == 0
    other.leave(limits, 0, 7.0)
    assert waits(one, limits) == DAY - 611
    clock["at"] += DAY - 611
    assert waits(one, limits) == 0


def test_requests_of_a_process_that_was_killed_are_no_longer_inside(tmp_path):
    limits = KeySettings("ann", "a" * 64, at_once=1)
    code = [
        "import sys, time; from pathlib import Path; from selfspec_cli.gateway.limits import KeySettings, Meter",
        "Meter(Path(sys.argv[1])).enter(KeySettings('ann', 'a' * 64, at_once=1)); print(flush=True); time.sleep(60)",
    ]
    words = [sys.executable, "-c", "\n".join(code), str(tmp_path / "limits")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert waits(Meter(tmp_path / "limits"), limits) == 1
    process.kill()
    process.wait()
    assert waits(Meter(tmp_path / "limits"), limits) == 0


class Collector(Fake):
    """Takes spans."""

    spans = b""

    async def complete(self, request):
        self.spans += await request.read()
        return web.Response()


async def test_spans_reach_a_collector_and_the_backend_joins_the_trace(tmp_path, monkeypatch):
    collector, trace = Collector(), "0af7651916cd43dd8448eb211c80319c"
    async with started(collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        async with running([Fake("a")], tmp_path) as on:
            await on.stream(ONCE, traceparent=f"00-{trace}-b7ad6b7169203331-01")
            await on.settled()
            assert trace in on.fakes["a"].headers[-1]["traceparent"]
            await asyncio.to_thread(on.gateway.tracing.close)
    assert bytes.fromhex(trace) in collector.spans
    assert b"selfspec.route" in collector.spans and b"selfspec-gateway" in collector.spans


async def test_a_log_that_selfspec_load_can_read(tmp_path):
    from selfspec_cli.texts import prompt_files

    async with running([Fake("a")], tmp_path, log_text=True) as on:
        await on.post(ONCE)
        chat = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        await on.post(chat, "/v1/chat/completions")
        await on.post({"model": "toy", "input": "x"}, "/v1/embeddings")
        await on.rows()
        found = prompt_files.read(str(on.gateway.log.file))
        assert [(prompt.text, prompt.chat) for prompt in found] == [("once", False), ("hello", True)]
