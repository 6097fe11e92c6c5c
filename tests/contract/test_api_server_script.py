"""experiments/serving/api_server.py: an engine's stand-in behind vLLM's API server, and what is reported of a run."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import importable

from selfspec_cli.record.latency import RequestTimes

pytestmark = pytest.mark.contract

FOLDER = Path(__file__).parents[2] / "experiments" / "serving"


@pytest.fixture(scope="module")
def script():
    with importable(FOLDER) as module:
        yield module("api_server")


def test_steps_are_as_long_as_they_were_measured(script):
    for requests, milliseconds in ((1, 3.4), (32, 4.2), (128, 6.4)):
        assert script.step(script.PLAIN, requests, 0) == pytest.approx((milliseconds / 1000, 1.0), rel=0.02)
    for requests, milliseconds in ((1, 4.7), (8, 5.3), (32, 6.7), (64, 8.2), (128, 13.8)):
        assert script.step(script.DRAFTING, requests, 0)[0] == pytest.approx(milliseconds / 1000, rel=0.04)
    assert script.step(script.LONGER, 128, 0) == pytest.approx((0.018, 3.27), rel=0.02)


def test_steps_that_a_request_joins_take_longer(script):
    for arm, more in ((script.PLAIN, 2.5), (script.SLOW_JOINS, 6.0), (script.DRAFTING, 0.3), (script.HELD, 0.3)):
        alone, joined = (script.step(arm, 100, joining)[0] for joining in (0, 1))
        assert joined - alone == pytest.approx(more / 1000)
    assert script.step(script.HELD, 100, 4)[0] == pytest.approx(script.step(script.DRAFTING, 100, 4)[0] + 0.004)


def test_nothing_is_drafted_while_requests_arrive_where_that_is_asked(script):
    assert script.step(script.NONE_FIRST, 100, 4)[1] == 1.0
    assert script.step(script.NONE_FIRST, 100, 3) == script.step(script.DRAFTING, 100, 3)
    assert script.step(script.NONE_FIRST, 3, 1) == script.step(script.DRAFTING, 3, 1)


def test_a_run_is_told_by_its_start_and_by_what_came_later(script):
    start = [RequestTimes(0.0, (wait, wait + 0.1), 10) for wait in (0.1, 0.3, 0.2)]
    later = [RequestTimes(1.0 + number / 10, (1.05 + number / 10, 1.2 + number / 10), 10) for number in range(10)]
    found = script.figures([*later, *start], clients=3, seconds=2.0)
    assert found["requests"] == 13 and found["tok_s"] == 65.0
    assert found["last_of_the_start_ms"] == 300.0
    assert found["settled_ttft_ms"] == found["settled_ttft_p99_ms"] == 50.0
    assert found["ttft_p99_ms"] == pytest.approx(288, abs=1)


def test_the_stand_in_gives_each_request_its_tokens(script, monkeypatch):
    monkeypatch.setattr(script, "step", lambda arm, requests, joining: (0.0, 3.0))

    async def tokens():
        engine = script.Engine(script.DRAFTING)
        for name, most in (("a", 1), ("b", 20)):
            await engine.add_request_async(
                SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(max_tokens=most))
            )
        found, ended = {"a": 0, "b": 0}, set()
        while len(ended) < 2:
            for one in (await engine.get_output_async()).outputs:
                assert one.request_id not in ended
                found[one.request_id] += len(one.new_token_ids)
                ended |= {one.request_id} if one.finish_reason is not None else set()
        engine.shutdown()
        return found

    assert asyncio.run(asyncio.wait_for(tokens(), 30)) == {"a": 1, "b": 20}
