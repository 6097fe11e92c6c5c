"""`selfspec gateway` as a process, servers that it starts, and several processes at one port."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from fake import Fake, answer
from running import DIGESTS, Process, Stream, process, started, until
from typer.testing import CliRunner

from selfspec_cli.commands.app import app
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway import demo, server, workers
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.backends.base import BackendKind
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.replica import State
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings, LimitSettings

SERVER = Path(__file__).parents[2] / "experiments" / "gateway" / "overhead.py"
PROMPT = {"model": "toy", "prompt": "once", "max_tokens": 40, "temperature": 0}
LIMITS = {"ann": {"admin": True}, "bob": {"requests_per_minute": 1}, "eve": {"at_once": 3}}
LIMITS["joe"] = {"money_per_day": 90}
KEYS = [{"name": name, "key": DIGESTS[name]} | own for name, own in LIMITS.items()]
STREAM = PROMPT | {"stream": True}


@pytest.mark.slow
async def test_a_gateway_with_few_files_refuses_new_connections_and_goes_on_with_the_others(tmp_path):
    """It raises its limit of open files as far as allowed and leaves some for backends. It ends after its stream."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 320))"
    async with process(tmp_path, [Fake("a", step=0.03)], few) as on, aiohttp.ClientSession() as session:
        await on.until_up(session)
        limits = Path(f"/proc/{on.process.pid}/limits").read_text()
        assert limits.partition("Max open files")[2].split()[0] == "320"  # of 128
        idle = [await asyncio.open_connection(*on.url.removeprefix("http://").split(":")) for _ in range(200)]
        assert [await reader.read(12) for reader, _ in idle[-100:]] == [b"HTTP/1.1 503"] * 100
        async with session.get(f"{on.url}/metrics") as response:
            assert 'backend_up{backend="a"} 1.0' in await response.text()
        async with session.post(f"{on.url}/v1/completions", json=STREAM) as response:
            ending = asyncio.ensure_future(on.end(signal.SIGINT))
            assert Stream(await response.read()).text == answer("once", 40)
        await ending


@pytest.mark.slow
async def test_a_gateway_reads_its_file_again_when_it_is_told_to_and_ends_its_streams_before_it_ends(tmp_path):
    fake, other = Fake("a", step=0.03), Fake("b", step=0.03)
    async with started(other), process(tmp_path, [fake]) as on, aiohttp.ClientSession() as session:
        await on.until_up(session)
        stream = asyncio.ensure_future(on.stream())
        await until(lambda: fake.running == 1)
        on.file.write_text("policy: fixd")
        on.process.send_signal(signal.SIGHUP)
        await on.until_said("stay as they were")
        on.write([other], keys=KEYS)
        on.process.send_signal(signal.SIGHUP)
        assert await stream == answer("once", 40)
        await on.until_said("were reloaded")
        await on.until_up(session)
        assert (await on.ask(body=STREAM, key="nobody"))[0] == 401
        last = asyncio.ensure_future(on.ask(body=STREAM))
        await until(lambda: other.running == 1)
        await on.end()
        _, headers, text = await last
        assert (headers["x-selfspec-backend"], Stream(text.encode()).text) == ("b", answer("once", 40))
    rows = (tmp_path / "gateway" / "requests.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["tokens"] == 40


async def test_a_fault_while_settings_are_reloaded_is_said_by_the_event_loop(monkeypatch):
    faults, loop = [], asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_exception_handler", lambda context: faults.append(context["exception"]))

    async def reload_settings():
        raise OSError("no program")

    server.at_hang_up(reload_settings, lambda text: None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
    gc.collect()
    assert faults
    loop.remove_signal_handler(signal.SIGHUP)


async def test_what_a_server_counted_before_other_settings_is_not_counted_again(tmp_path):
    def drafted(rounds, accepted):
        drafts = f"vllm:spec_decode_num_drafts_total {rounds}\nvllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        return f"vllm:num_requests_running 0\n{drafts}"

    fakes = [Fake("a", metrics=drafted(1000, 3000)), Fake("b", metrics=drafted(5000, 20_000))]
    async with started(*fakes), AsyncExitStack() as stack:
        first, other = (BackendSettings("one", "local", fake.url) for fake in fakes)
        gateway = Gateway(GatewaySettings(backends=[first], results_dir=str(tmp_path)))
        supervisor = await stack.enter_async_context(server.opened(gateway))
        for settings, tokens in ((first, 4.0), (replace(first, price_out=1.0), 1.0), (other, 5.0), (first, 1.0)):
            await server.reload(gateway, supervisor, replace(gateway.settings, backends=[settings]))
            assert await supervisor.ready(40)
            assert gateway.replicas[0].load.tokens == tokens  # of a round; 1 as long as none has ended since
        fakes[0].metrics = drafted(1100, 3100)
        await until(lambda: gateway.replicas[0].load.tokens == 2.0)


def test_a_port_that_is_taken_is_found_before_a_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "serve", lambda *given: pytest.fail("servers were started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["two_servers", "host=127.0.0.1", f"port={port}", f"results_dir={tmp_path}"]
        found = CliRunner().invoke(app, ["gateway", *words])
        assert found.exit_code == 2
        said = " ".join(found.output.split())
        assert f"port={port}: it cannot listen on 127.0.0.1:{port} (" in said and "in use" in said


@pytest.fixture
def tiny(monkeypatch):
    """Has this Python code be the server of the kind `tiny`; gives its settings."""

    def made(*code, **more):
        command = lambda settings, port: [sys.executable, *code, str(port)]  # noqa: E731
        monkeypatch.setitem(BACKENDS._found, "tiny", BackendKind("tiny", "a server", lambda settings: None, command))
        return BackendSettings(name="one", kind="tiny", words=["x=1"], **more)

    return made


def test_a_demo_whose_server_ends_says_which_and_where_its_log_is(tmp_path, tiny):
    settings = GatewaySettings(results_dir=str(tmp_path), backends=[tiny("-c", "x")])
    with pytest.raises(demo.DemoFailed, match=r"^one ended before it answered; its log: ") as failed:
        demo.run(settings, lambda text: None)
    assert "NameError" in Path(str(failed.value).rpartition("its log: ")[2]).read_text()


async def test_a_server_is_started_adopted_by_the_next_gateway_and_ended_by_its_own(tmp_path, tiny):
    def made(**more):
        backend = tiny(str(SERVER), "--step", "0.01", "--serve", **more)
        return Gateway(GatewaySettings(backends=[backend], results_dir=str(tmp_path)))

    first = made()
    async with server.opened(first) as supervisor:
        assert await supervisor.ready(40)
        process = supervisor.processes["one"]
        second = made(url=first.replicas[0].url)
        async with server.opened(second) as adopting:
            assert await adopting.ready(10)
            assert adopting.processes == {}
        assert process.poll() is None  # who adopts a server does not end it
        async with server.opened(made(), starts=False) as worker:  # nor does a worker start one
            assert worker.processes == {}
        process.kill()
        await until(lambda: first.replicas[0].state is State.down)
    assert process.poll() is not None


async def test_a_server_that_ends_at_once_is_not_waited_for(tmp_path, tiny):
    said = []
    backend = tiny("-c", "raise SystemExit('no luck')")
    gateway = Gateway(GatewaySettings(backends=[backend], results_dir=str(tmp_path)))
    async with server.opened(gateway, said.append) as supervisor:
        assert not await supervisor.ready(30)
        await until(lambda: len(said) == 2)
        await asyncio.sleep(0.3)
    log = tmp_path / "gateway" / "backend-one.log"
    assert "no luck" in log.read_text()
    assert said[1:] == [f"one: its server ended with exit code 1; its log {log} ends with: no luck"]  # and said once


FRAGMENTS = """
import os
from pathlib import Path
from selfspec_cli.gateway import server
{call}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
bytearray(20_000_000)  # glibc takes blocks of up to that size from the heap from now on
large, small, before = [], [], resident()
for _ in range(200):
    large.append(bytearray(300_000))
    small.append(bytearray(700))  # lives on above the large one
    del large[:-100]
large.clear()
print(resident() - before)
"""


def test_memory_of_long_bodies_goes_back_to_the_system():
    """Of a process in which a small block above each large one lives on."""
    codes = [FRAGMENTS.format(call=call) for call in ("", "server.prepare_memory()")]
    left = [int(subprocess.check_output([sys.executable, "-c", code])) for code in codes]
    assert left[1] < 5 < left[0]


# ---- several processes at one port


class TwoWorkers(Process):
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
    async with process(folder, fakes, kind=TwoWorkers, workers=2, keys=KEYS, **more) as on:
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
    async with started(other), two_workers(tmp_path, [fake]) as on:
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
