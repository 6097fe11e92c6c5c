"""`selfspec gateway` as a process, and servers that a gateway starts."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import aiohttp
import pytest
from fake import Fake, answer
from running import TENANTS, Stream, process, until
from typer.testing import CliRunner

from selfspec_cli.commands.app import app
from selfspec_cli.gateway import demo, server
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.backends.base import BackendKind
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.replica import State
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings

SERVER = Path(__file__).parents[2] / "experiments" / "gateway" / "overhead.py"
KEYS = [asdict(one) for one in TENANTS]
PROMPT = {"model": "toy", "prompt": "once", "max_tokens": 40, "temperature": 0, "stream": True}


@pytest.mark.slow
@pytest.mark.parametrize("wish", [signal.SIGTERM, signal.SIGINT])
async def test_a_gateway_that_is_told_to_end_ends_its_streams_first(tmp_path, wish):
    async with process(tmp_path, [Fake("a", step=0.03)]) as on, aiohttp.ClientSession() as session:
        await on.until_up(session)
        async with session.post(f"{on.url}/v1/completions", json=PROMPT) as response:
            raw = await response.content.readany()
            ending = asyncio.ensure_future(on.end(wish))
            raw += await response.read()
        await ending
    assert Stream(raw).text == answer("once", 40)
    (row,) = (tmp_path / "gateway" / "requests.jsonl").read_text().splitlines()
    assert json.loads(row)["tokens"] == 40


@pytest.mark.slow
async def test_a_gateway_with_few_files_refuses_new_connections_and_goes_on_with_the_others(tmp_path):
    """It raises its own limit as far as it may, and leaves files for backends."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 320))"
    async with process(tmp_path, [Fake("a")], few) as on, aiohttp.ClientSession() as session:
        await on.until_up(session)
        limits = Path(f"/proc/{on.process.pid}/limits").read_text()
        assert limits.partition("Max open files")[2].split()[0] == "320"  # of 128
        idle = [await asyncio.open_connection(*on.url.removeprefix("http://").split(":")) for _ in range(200)]
        assert [await reader.read(12) for reader, _ in idle[-100:]] == [b"HTTP/1.1 503"] * 100
        async with session.post(f"{on.url}/v1/completions", json=PROMPT) as response:
            assert Stream(await response.read()).text == answer("once", 40)
        async with session.get(f"{on.url}/metrics") as response:
            assert 'backend_up{backend="a"} 1.0' in await response.text()
        for _, writer in idle:
            writer.close()


@pytest.mark.slow
async def test_a_gateway_reads_its_file_again_when_it_is_told_to(tmp_path):
    other = Fake("b")
    await other.start()
    fake = Fake("a", step=0.03)
    async with process(tmp_path, [fake]) as on, aiohttp.ClientSession() as session:
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
        assert (await on.ask(body=PROMPT, key="nobody"))[0] == 401
        assert (await on.ask(body=PROMPT))[1]["x-selfspec-backend"] == "b"
    await other.stop()


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
