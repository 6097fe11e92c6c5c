"""A real Prometheus scrapes a gateway, and every panel of its dashboard has data. `make programs` installs it."""

import asyncio
import math
import time
from contextlib import suppress

import httpx
import programs
import pytest
from fake import Fake
from prometheus import prometheus, queries
from running import ONCE, running

from selfspec_cli.gateway.settings import CacheSettings, LedgerSettings

pytestmark = [pytest.mark.slow, programs.needs("prometheus")]
SECONDS = 40.0  # for the tests' minute, Prometheus's start included
METRICS = (
    "vllm:num_requests_running 1\nvllm:spec_decode_num_drafts_total 9\nvllm:spec_decode_num_accepted_tokens_total 18\n"
)


async def test_every_panel_has_data(tmp_path):
    backends = {"a": {"price_hour": 3600.0}, "b": {"price_hour": 3600.0}}
    fakes = [Fake("a", step=0.001, metrics=METRICS), Fake("b", step=0.0005, times=2, die_after=5)]
    more = {"policy": "round_robin", "ledger": LedgerSettings(plain_share=0.5), "cache": CacheSettings(mib=8)}
    async with running(fakes, tmp_path, backends=backends, **more) as on:
        with prometheus("gateway.yml", on.url, tmp_path) as ask:
            await traffic(on)
            await until_finite(ask, ["selfspec_gateway_in_flight"])
            await traffic(on)  # a rate needs two looks
            await until_finite(ask, queries("gateway.json"))


async def traffic(on):
    for number in range(12):
        wishes = {"cache": "exact" if number > 5 else "none"}
        await on.stream(ONCE | {"prompt": f"once {number % 8}", "selfspec": wishes})
    await on.settled()
    assert (await on.get("/gateway/routes"))[0] == 200


async def until_finite(ask, queries):
    """Until every query has data that are numbers."""
    until = time.monotonic() + SECONDS
    for query in queries:
        while not await asyncio.to_thread(finite, ask, query):
            assert time.monotonic() < until, query
            await asyncio.sleep(0.3)


def finite(ask, query):
    with suppress(httpx.HTTPError):  # Prometheus starts
        return any(math.isfinite(float(one["value"][1])) for one in ask(query)["result"])
    return False
