"""Several processes at one port: what they share, what a worker's death costs, and what they refuse."""

import asyncio
import json
import os
import signal
import socket
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from fake import Fake, answer
from running import DIGESTS, Process, process, until

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway import workers
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings, LimitSettings

PROMPT = {"model": "toy", "prompt": "once", "max_tokens": 40, "temperature": 0}
LIMITS = {"ann": {"admin": True}, "bob": {"requests_per_minute": 1}, "eve": {"at_once": 3}}
LIMITS["joe"] = {"money_per_day": 90}
KEYS = [{"name": name, "key": DIGESTS[name]} | own for name, own in LIMITS.items()]


class Gateway(Process):
    """A gateway of several workers."""

    def workers(self):
        """Process ids."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(one) for one in children if b"workers" in Path(f"/proc/{one}/cmdline").read_bytes()]

    async def until_all(self, fits, method="POST", path="/v1/completions", key="ann", body=None):
        """Until eight answers, each over a connection of its own, fit: those of both workers."""
        number, fine = 0, 0
        while fine < 8:
            number += 1
            new = body or PROMPT | {"prompt": f"{number} until", "max_tokens": 1}
            status, headers, _ = await self.ask(method, path, new if method == "POST" else None, key)
            fine = fine + 1 if fits(status, headers) else 0


@asynccontextmanager
async def two_workers(folder, fakes, **more):
    async with process(folder, fakes, kind=Gateway, workers=2, keys=KEYS, **more) as on:
        await on.until_said("2 workers")
        await on.until_all(lambda status, headers: status == 200, "GET", "/health")  # each worker looks for itself
        yield on


def sockets(process):
    """Connections that a process has."""
    found = 0
    for one in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += "socket:" in os.readlink(one)
    return found


@pytest.mark.slow
async def test_workers_share_limits_cache_counts_and_drains(tmp_path):
    fake, other = Fake("a", step=0.005), Fake("b")
    async with two_workers(tmp_path, [fake, other], cache={"mib": 8}) as on:
        assert len(on.workers()) == 2
        found = [(await on.ask(body=PROMPT | {"prompt": f"{n}"}, key="bob"))[:2] for n in range(9)]
        assert [status for status, _ in found] == [200] + [429] * 8
        assert all(int(head["retry-after"]) > 0 for status, head in found if status == 429)
        fake.first = 3600
        held = [asyncio.ensure_future(on.ask(body=PROMPT | {"prompt": f"{n} held"}, key="eve")) for n in range(3)]
        await until(lambda: fake.running == 3)
        assert {(await on.ask(body=PROMPT, key="eve"))[0] for _ in range(6)} == {429}
        fake.first = 0
        for one in held:
            one.cancel()
        await on.until_all(lambda status, headers: status == 200, key="eve")
        spent = [(await on.ask(body=PROMPT | {"prompt": f"{n} dear"}, key="joe"))[0] for n in range(3)]
        assert spent == [200, 200, 200]  # forty tokens cost forty, and a request is charged after it was answered
        await on.until_all(lambda status, headers: status == 429, key="joe")
        await on.until_all(lambda status, headers: "hit" in headers.get("x-selfspec-cache", ""), body=PROMPT)
        rows, counted = [], 0.0
        while len(rows) < 20 or counted != len(rows):  # rows are written once their requests have ended
            await asyncio.sleep(0.3)
            rows = (tmp_path / "gateway" / "requests.jsonl").read_text().splitlines()
            shown = [line for line in (await on.ask("GET", "/metrics"))[2].splitlines() if "_requests_total{" in line]
            counted = sum(float(line.split()[-1]) for line in shown)
        assert len({json.loads(row)["id"] for row in rows}) == counted
        assert (await on.ask("POST", "/gateway/feedback", {"request_id": "x", "quality": 1}))[0] == 400
        assert (await on.ask(body=PROMPT | {"selfspec": {"policy": "quality"}}))[0] == 400
        assert (await on.ask("POST", "/gateway/backends/a/drain"))[0] == 200
        await on.until_all(lambda status, headers: headers["x-selfspec-backend"] == "b")
        await on.end()
        await on.start()  # what was spent is not forgotten
        await on.until_all(lambda status, headers: status == 200, "GET", "/health")
        assert (await on.ask(body=PROMPT, key="joe"))[0] == 429


@pytest.mark.slow
async def test_a_worker_that_is_killed_costs_its_own_streams_alone(tmp_path):
    fake = Fake("a", step=0.03)
    async with two_workers(tmp_path, [fake]) as on:
        before = {one: sockets(one) for one in on.workers()}
        streams = [asyncio.ensure_future(on.stream()) for _ in range(40)]
        await until(lambda: fake.running == 40)
        assert all(sockets(one) > count for one, count in before.items())  # both answer
        killed, left = before
        os.kill(killed, signal.SIGKILL)
        await on.until_said(f"exit code {-signal.SIGKILL}; another one takes its place")
        texts = await asyncio.gather(*streams, return_exceptions=True)
        assert 0 < texts.count(answer("once", 40)) < 40
        assert all(isinstance(one, aiohttp.ClientError) for one in texts if one != answer("once", 40))
        await until(lambda: len(on.workers()) == 2)
        assert left in on.workers()


@pytest.mark.slow
async def test_workers_take_other_settings_and_end_with_the_process_above(tmp_path):
    fake, other = Fake("a", step=0.03), Fake("b", step=0.03)
    await other.start()
    async with two_workers(tmp_path, [fake]) as on:
        streams = [asyncio.ensure_future(on.stream()) for _ in range(8)]
        await until(lambda: fake.running == 8)
        for change, said in (({"workers": 3}, "workers=3: it is 2 until a restart"), ({}, "were reloaded")):
            on.write([other], **{"workers": 2, "keys": KEYS, **change})
            on.process.send_signal(signal.SIGHUP)
            await on.until_said(said)
        assert await asyncio.gather(*streams) == [answer("once", 40)] * 8
        await on.until_all(lambda status, headers: headers.get("x-selfspec-backend") == "b")
        stream, pids = asyncio.ensure_future(on.stream()), on.workers()
        await until(lambda: other.running == 1)
        on.process.kill()
        await on.process.wait()
        assert await stream == answer("once", 40)
        await until(lambda: not any(lives(one) for one in pids))
    await other.stop()


def lives(process):
    file = Path(f"/proc/{process}/stat")
    return file.exists() and file.read_text().rpartition(") ")[2][0] != "Z"


def test_each_worker_has_its_share_of_what_may_be_there_at_once():
    backends = [BackendSettings(name="a", url=None, at_once=5), BackendSettings(name="b", url="http://b")]
    settings = GatewaySettings(workers=2, limits=LimitSettings(at_once=9), backends=backends)
    made = workers.share(settings, ["http://started", "http://b"], 81)
    assert (made["port"], made["limits"]["at_once"]) == (81, 4)
    assert [(one["url"], one["at_once"]) for one in made["backends"]] == [("http://started", 2), ("http://b", None)]


def test_a_port_that_another_program_has_is_not_shared():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="it cannot listen on"):
        workers.bound("127.0.0.1", taken.getsockname()[1])
