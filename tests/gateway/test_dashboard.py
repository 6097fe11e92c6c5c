"""A real Prometheus scrapes a gateway, and every panel of its dashboard has data. `make programs` installs it."""

import asyncio
import json
import math
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import programs
import pytest
from fake import Fake
from running import ONCE, running

from selfspec_cli.engine.server import free_port
from selfspec_cli.gateway.settings import CacheSettings, LedgerSettings

pytestmark = [pytest.mark.slow, programs.needs("prometheus")]
INFRA = Path(__file__).parents[2] / "infra"
SECONDS = 40.0  # for the tests' minute, Prometheus's start included
METRICS = (
    "vllm:num_requests_running 1\nvllm:spec_decode_num_drafts_total 9\nvllm:spec_decode_num_accepted_tokens_total 18\n"
)


def queries():
    dashboard = json.loads((INFRA / "grafana" / "gateway.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5m") for query in found]


async def test_every_panel_has_data(tmp_path):
    backends = {"a": {"price_hour": 3600.0}, "b": {"price_hour": 3600.0}}
    fakes = [Fake("a", step=0.001, metrics=METRICS), Fake("b", step=0.0005, times=2, die_after=5)]
    more = {"policy": "round_robin", "ledger": LedgerSettings(plain_share=0.5), "cache": CacheSettings(mib=8)}
    async with running(fakes, tmp_path, backends=backends, **more) as on:
        with open(tmp_path / "log", "wb") as out:
            port = free_port()
            process = subprocess.Popen(command(on.url, tmp_path, port), stdout=out, stderr=out)
        try:
            await traffic(on)
            await until_finite(port, ["selfspec_gateway_in_flight"])
            await traffic(on)  # a rate needs two looks
            await until_finite(port, queries())
        finally:
            process.terminate()
            process.wait(30)


async def traffic(on):
    for number in range(12):
        wishes = {"cache": "exact" if number > 5 else "none"}
        await on.stream(ONCE | {"prompt": f"once {number % 8}", "selfspec": wishes})
    await on.settled()
    assert (await on.get("/gateway/routes"))[0] == 200


def command(url, folder, port):
    text = (INFRA / "prometheus" / "gateway.yml").read_text(encoding="utf-8")
    assert "localhost:8080" in text and "15s" in text
    text = text.replace("localhost:8080", url.removeprefix("http://")).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    files = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    return ["prometheus", *files, f"--web.listen-address=127.0.0.1:{port}"]


async def until_finite(port, wanted):
    """Until every query has data that are numbers."""
    until = time.monotonic() + SECONDS
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for query in wanted:
            while not await finite(session, query):
                assert time.monotonic() < until, query
                await asyncio.sleep(0.3)


async def finite(session, query):
    with suppress(aiohttp.ClientError, ValueError):  # Prometheus starts
        async with session.get("/api/v1/query", params={"query": query}) as response:
            found = (await response.json())["data"]["result"]
            return any(math.isfinite(float(one["value"][1])) for one in found)
    return False
