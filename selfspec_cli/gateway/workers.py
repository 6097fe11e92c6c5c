"""Several processes that answer at one port (`workers`), and the process above them.

The process above starts backends and workers, and a worker anew that has ended. A worker gets settings and the names of
drained backends by stdin, a JSON object a line, and ends with it. By stdout it says where it listens and what was
drained.

The kernel spreads connections over the workers (SO_REUSEPORT). Limits of keys, cache, log and counts are shared by
files. Queues, breakers, predictions and shared calls are each worker's own, and so is its share of `at_once`.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway import server
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.server import DRAIN_SECONDS, Say
from selfspec_cli.gateway.settings import GatewaySettings, checked
from selfspec_cli.gateway.telemetry import FILES

AGAIN_SECONDS = 0.5  # after which a worker that has ended is started anew
LONGEST = 1 << 26  # bytes of a line with settings


def bound(host: str, port: int) -> socket.socket:
    """A socket at a port that several processes may have; raises ConfigError."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        raise ConfigError(f"port={port}: it cannot listen on {host}:{port} ({error.strerror})") from error
    return found


def share(settings: GatewaySettings, urls: Sequence[str], port: int) -> dict[str, Any]:
    """The settings of one worker. urls: of the backends, which are started already."""
    found = asdict(settings) | {"port": port}
    for limited in (found["limits"], *found["backends"]):
        limited["at_once"] = limited["at_once"] and limited["at_once"] // settings.workers
    for backend, url in zip(found["backends"], urls, strict=True):
        backend["url"] = url
    return found


# ---- the process above -----------------------------------------------------------------------------------------------


class Crew:
    """The workers. settings: of a worker, as it gets them. processes: by number. drained: names of backends."""

    def __init__(self, count: int, settings: dict[str, Any], files: str, say: Say) -> None:
        self.count, self.settings, self.files, self.say = count, settings, files, say
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.drained: set[str] = set()
        self.listening: set[int] = set()
        self.ending = asyncio.Event()

    def tell(self, *processes: asyncio.subprocess.Process) -> None:
        line = json.dumps({"settings": self.settings, "drained": sorted(self.drained)}).encode() + b"\n"
        for process in processes:
            process.stdin.write(line)  # type: ignore[union-attr]

    async def keep(self, number: int) -> None:
        """Have a worker run until the end; raises ConfigError where it has never listened."""
        while not self.ending.is_set():
            process = self.processes[number] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "selfspec_cli.gateway.workers"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {FILES: self.files},
                start_new_session=True,  # Ctrl-C is for the process above
            )
            assert process.stdin is not None and process.stdout is not None
            self.tell(process)
            if self.ending.is_set():  # meanwhile
                process.stdin.close()
            async for line in process.stdout:
                if line.startswith(b"{"):  # and no warning of some library
                    self._heard(number, json.loads(line))
            code = await process.wait()
            mark_process_dead(process.pid, self.files)
            if self.ending.is_set():
                return
            if number not in self.listening:
                raise ConfigError(f"worker {number} ended with exit code {code} before it listened")
            self.say(f"worker {number} ended with exit code {code}; another one takes its place")
            await asyncio.sleep(AGAIN_SECONDS)

    def _heard(self, number: int, message: dict[str, Any]) -> None:
        if "drain" in message:
            name, drains = message["drain"]
            self.drained = self.drained | {name} if drains else self.drained - {name}
            self.tell(*self.processes.values())
        elif number not in self.listening:
            self.listening.add(number)
            if len(self.listening) == self.count:
                self.say(f"{message['said']}, {self.count} workers")

    async def end(self) -> None:
        self.ending.set()
        for process in self.processes.values():
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), DRAIN_SECONDS + 5)
            except TimeoutError:
                process.kill()


def serve(settings: GatewaySettings, say: Say, again: Callable[[], GatewaySettings]) -> None:
    """As `server.serve`, by `settings.workers` processes."""

    async def run() -> None:
        gateway = Gateway(settings)
        with bound(settings.host, settings.port) as reserved, tempfile.TemporaryDirectory() as files:
            async with server.opened(gateway, say) as supervisor:

                def shared() -> dict[str, Any]:
                    return share(gateway.settings, [one.url for one in gateway.replicas], reserved.getsockname()[1])

                async def reload() -> None:
                    await server.reload(gateway, supervisor, again())
                    crew.settings = shared()
                    crew.tell(*crew.processes.values())

                crew = Crew(settings.workers, shared(), files, say)
                server.at_hang_up(reload, say)
                for one in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(one, crew.ending.set)
                kept = [asyncio.ensure_future(crew.keep(number)) for number in range(settings.workers)]
                ended = asyncio.ensure_future(crew.ending.wait())
                await asyncio.wait([ended, *kept], return_when=asyncio.FIRST_COMPLETED)
                await crew.end()
                await asyncio.gather(*kept)

    asyncio.run(run())


# ---- a worker --------------------------------------------------------------------------------------------------------


async def work() -> None:
    """Answer until the process above ends this one, or is gone."""
    lines = asyncio.StreamReader(LONGEST)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = json.loads(await lines.readline())
    settings: GatewaySettings = checked(GatewaySettings, first["settings"], "")
    gateway = Gateway(settings)
    gateway.tell = lambda name, drains: _say(drain=[name, drains])
    async with server.opened(gateway, starts=False) as supervisor:
        web = server.server(gateway, lambda text: _say(said=text))

        async def listen(known: dict[str, Any]) -> None:
            while True:
                for one in gateway.replicas:
                    one.draining = one.name in known["drained"]
                if not (line := await lines.readline()):
                    return web.handle_exit(signal.SIGTERM, None)
                before, known = known, json.loads(line)
                if known["settings"] != before["settings"]:
                    await server.reload(gateway, supervisor, checked(GatewaySettings, known["settings"], ""))

        listening = asyncio.ensure_future(listen(first))
        server.prepare_memory()
        await web.serve([bound(settings.host, settings.port)])
        listening.cancel()


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(work())
