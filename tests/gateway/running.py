"""A gateway and its fake backends in one event loop, and clients for it."""

import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from fake import Fake, answer

from selfspec_cli.gateway import replica, server, supervisor
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings, KeySettings, LedgerSettings, LimitSettings

QUICK = LimitSettings(first_byte_seconds=20.0, stall_seconds=20.0, queue_seconds=0.3)
supervisor.POLL_SECONDS = 0.05
supervisor.OTHERS_SECONDS = 0.2
replica.OPEN_SECONDS = 0.3


@dataclass
class Stream:
    """What a client got of a stream."""

    raw: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [part.removeprefix("data: ") for part in self.raw.decode().split("\n\n") if part]
        assert lines[-1] == "[DONE]"
        assert "[DONE]" not in lines[:-1]
        return [json.loads(line) for line in lines[:-1]]

    @property
    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


@dataclass
class Running:
    """A gateway that listens, and its backends by name."""

    gateway: Gateway
    url: str
    fakes: dict[str, Fake]
    session: aiohttp.ClientSession
    said: list[str]

    @property
    def address(self) -> list[str]:
        """Host and port."""
        return self.url.removeprefix("http://").split(":")

    async def post(
        self, body: Any, path: str = "/v1/completions", method: str = "POST", **headers: str
    ) -> tuple[int, Any, Any]:
        """(status, JSON, headers)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        async with self.session.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def judge(self, quality: float, headers: Any = None, **what: str) -> tuple[int, Any, Any]:
        """Judge a request or an entry of the cache."""
        return await self.post({**what, "quality": quality}, "/gateway/feedback", **(headers or {}))

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> Stream:
        """A stream, read to its end."""
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=headers) as response:
            return Stream(await response.read(), dict(response.headers))

    async def talk(self, raw: bytes, wait: float = 5) -> bytes:
        """What a raw client gets until the connection is closed, or nothing more has come after `wait` seconds."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(raw)
        found = b""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(wait):
                while part := await reader.read(65536):
                    found += part
        writer.close()
        return found

    async def settled(self) -> None:
        """Wait until what was asked is counted too, which is after its answer was sent."""
        await until(lambda: self.gateway.inside == 0)

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        await self.settled()
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def rows(self) -> list[dict[str, Any]]:
        """The log so far."""
        await self.settled()
        self.gateway.log.write()
        return [json.loads(line) for line in self.gateway.log.file.read_text().splitlines()]


class Process:
    """`selfspec gateway` as a process. file: its settings; said: its stderr so far; url: where it listens."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gateway.yaml"

    def write(self, fakes: Sequence[Fake], **more: Any) -> None:
        """Its settings: a gateway in front of these backends, whose tokens cost one each."""
        backends = [{"name": one.name, "kind": "local", "url": one.url, "price_out": 1e6} for one in fakes]
        settings = {"port": 0, "results_dir": str(self.file.parent), "policy": "fixed", "ledger": {"plain_share": 0}}
        self.file.write_text(json.dumps({**settings, "backends": backends, **more}))

    async def start(self, code: str = "") -> None:
        """code: Python before it."""
        run = "import runpy, sys; sys.argv[0] = 'selfspec'; runpy.run_module('selfspec_cli', run_name='__main__')"
        words = (sys.executable, "-c", f"{code}\n{run}", "gateway", str(self.file))
        self.said = ""
        self.process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
        await self.until_said("/v1", "listening on ")
        self.url = self.said.partition("listening on ")[2].partition("/v1")[0]

    async def until_said(self, word: str, after: str = "") -> None:
        while word not in self.said.partition(after)[2] if after else word not in self.said:
            part = await self.process.stderr.read(4096)
            assert part, self.said
            self.said += part.decode()

    async def until_up(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self.url}/health") as response:
                await response.read()  # then its connection is kept
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)

    async def ask(
        self, method: str = "POST", path: str = "/v1/completions", body: Any = None, key: str = "ann"
    ) -> tuple[int, Any, str]:
        """(status, headers, what came) over a connection of its own, so that any worker may get it."""
        head = {"Authorization": f"Bearer {key}", "Connection": "close"}
        async with aiohttp.request(method, self.url + path, json=body, headers=head) as response:
            return response.status, response.headers, await response.text()

    async def stream(self) -> str:
        """The text of a stream of forty tokens."""
        body = {"model": "toy", "prompt": "once", "max_tokens": 40, "temperature": 0, "stream": True}
        return Stream((await self.ask(body=body))[2].encode()).text

    async def end(self, wish: int = signal.SIGTERM) -> None:
        self.process.send_signal(wish)
        rest = await self.process.communicate()
        assert self.process.returncode == 0, self.said + rest[1].decode()


@asynccontextmanager
async def started(*fakes: Fake) -> AsyncIterator[None]:
    """These backends, up to the end of the block."""
    for fake in fakes:
        await fake.start()
    yield
    for fake in fakes:
        await fake.stop()


@asynccontextmanager
async def process(
    folder: Path, fakes: Sequence[Fake], code: str = "", kind: type[Process] = Process, **settings: Any
) -> AsyncIterator[Any]:
    """A gateway as a process in front of these backends."""
    async with started(*fakes):
        on = kind(folder)
        on.write(fakes, **settings)
        await on.start(code)
        yield on
        if on.process.returncode is None:
            await on.end()


@asynccontextmanager
async def running(
    fakes: Sequence[Fake],
    folder: Path,
    *,
    kinds: dict[str, str] | None = None,
    backends: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A gateway over these backends. kinds, backends: by the backend's name, its kind and more of its settings."""
    more = {"policy": "fixed", "ledger": LedgerSettings(0.0), "limits": QUICK, "results_dir": str(folder), "port": 0}
    kinds, own = kinds or {}, backends or {}
    async with started(*fakes):
        made = [
            BackendSettings(one.name, kinds.get(one.name, "local"), one.url, **own.get(one.name, {})) for one in fakes
        ]
        gateway = Gateway(GatewaySettings(backends=made, **more | settings))
        async with server.opened(gateway) as looking:
            said: list[str] = []
            web = server.server(gateway, said.append)
            task = asyncio.ensure_future(web.serve())
            while not web.started:
                await asyncio.sleep(0.01)
            port = web.servers[0].sockets[0].getsockname()[1]
            assert await looking.ready(40, [one.name for one in fakes if not one.dead])
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                yield Running(gateway, f"http://127.0.0.1:{port}", {one.name: one for one in fakes}, session, said)
            web.should_exit = True
            await task


# ---- What tests of hostile clients and backends have in common


PROMPT = {"model": "toy", "prompt": "once upon", "max_tokens": 8, "temperature": 0}
WANTED = answer("once upon", 8)
ONCE = {"model": "toy", "prompt": "once", "max_tokens": 12, "temperature": 0}
DIGESTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob", "eve", "joe")}
TENANTS = [KeySettings(name, DIGESTS[name], admin=name == "ann") for name in ("ann", "bob")]
ANN, BOB = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}


async def until(condition):
    """Wait for it; the test's own limit of a minute ends what never comes."""
    while not condition():
        await asyncio.sleep(0.01)
