"""Backends over time: started or adopted, found healthy, warmed up, looked at once a second, ended."""

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from selfspec_cli import children, terminal
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.backends.base import log_of, serve_command, without_v1
from selfspec_cli.gateway.replica import Counts, Replica, State, read
from selfspec_cli.gateway.settings import BackendSettings
from selfspec_cli.gateway.timing import FEW
from selfspec_cli.gateway.upstream import BackendFailed, Upstream, prepared
from selfspec_cli.gateway.wire import loads

POLL_SECONDS = 1.0  # between two looks at a vLLM server's /health and /metrics
OTHERS_SECONDS = 10.0  # likewise at the models of any other backend
UNLISTED = (400, 404, 405, 501)  # of HTTP: it has no /v1/models
NO_LIST = (ValueError, LookupError, TypeError)  # of what is no list of models
STOP_SECONDS = 20.0
WARM_TOKENS, WARM_WORDS = 8, 16  # of each of the first requests
WARM_SECONDS = 20.0  # for which other backends of its host wait for one that warms up
WARM_TOGETHER = 4  # of them at once: what one more costs is known before many come


def replica(settings: BackendSettings) -> Replica:
    """The backend of these settings, before anything is known of it."""
    kind = BACKENDS[settings.kind]
    url = settings.url or ""
    return Replica(settings, vllm=kind.vllm, url=without_v1(url) if kind.vllm else url, model=settings.model or "")


class Supervisor:
    """Starts what has to be started, and looks after all backends. folder: for the logs of servers. looked: called
    after each look. say: called with messages for people. starts: whether servers are started here, or elsewhere."""

    def __init__(
        self, upstream: Upstream, folder: Path, looked: Callable[[], None], say: Callable[[str], None], starts: bool
    ) -> None:
        self.replicas: list[Replica] = []
        self.upstream, self.folder = upstream, folder
        self.looked, self.say, self.starts = looked, say, starts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._counts: dict[tuple[str, str], Counts] = {}  # of servers that were left, by name and address
        self._said: set[str] = set()  # backends of which it was said that their server ended
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._warming: dict[Replica, asyncio.Task[None]] = {}
        self._retired: dict[subprocess.Popen[bytes], asyncio.Task[None]] = {}

    async def take(self, replicas: Sequence[Replica]) -> None:
        """Look after these backends: start what is new, and end the servers of the others once no request is there."""
        gone = [replica for replica in self._tasks if replica not in replicas]
        self.replicas = list(replicas)
        for replica in gone:
            replica.draining = True
            self._counts[replica.name, replica.url] = replica.counts or {}
            self._tasks.pop(replica).cancel()
            if process := self.processes.pop(replica.name, None):
                self._retired[process] = asyncio.ensure_future(self._retire(replica, process))
        new = [replica for replica in self.replicas if replica not in self._tasks]
        if self.starts:
            await asyncio.gather(*map(self._start, new))
        ours = [one for one in self.replicas if BACKENDS[one.settings.kind].command is serve_command]
        hosts = {one: urlsplit(one.url).hostname for one in ours}  # others may be anywhere
        for replica, host in hosts.items():
            replica.neighbours = [one for one, other in hosts.items() if other == host and one is not replica]
        for replica in new:
            replica.counts = self._counts.get((replica.name, replica.url))
            self._tasks[replica] = asyncio.ensure_future(self._look_on(replica))

    async def close(self) -> None:
        """End the servers that were started here; those that were adopted go on."""
        for task in (*self._tasks.values(), *self._retired.values()):
            task.cancel()
        await self._end([*self.processes.values(), *self._retired])

    async def _retire(self, replica: Replica, process: subprocess.Popen[bytes]) -> None:
        while replica.flights:
            await asyncio.sleep(POLL_SECONDS)
        await self._end([process])

    async def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        ends = [asyncio.to_thread(children.end, process, signal.SIGINT, STOP_SECONDS) for process in processes]
        await asyncio.gather(*ends)

    async def ready(self, seconds: float, names: Sequence[str] = ()) -> bool:
        """Wait until these backends (all, where none are named) take requests; False where they do not in time."""
        until = time.monotonic() + seconds
        wanted = [replica for replica in self.replicas if not names or replica.name in names]
        while time.monotonic() < until:
            if all(replica.state is State.up for replica in wanted):
                return True
            if any(map(self.ended, wanted)):
                return False
            await asyncio.sleep(0.1)
        return False

    def ended(self, replica: Replica) -> bool:
        """Whether its server was started here, and is gone."""
        process = self.processes.get(replica.name)
        return process is not None and process.poll() is not None

    async def _start(self, replica: Replica) -> None:
        kind, settings = BACKENDS[replica.settings.kind], replica.settings
        if replica.url:
            with suppress(BackendFailed, *NO_LIST):
                await self._listed(replica)
                return self.say(f"{replica.name}: answers at {replica.url}")
        port = (urlsplit(replica.url).port if replica.url else None) or children.free_port()
        local = not replica.url or urlsplit(replica.url).hostname in ("127.0.0.1", "localhost")
        if kind.command is None or not local or (replica.url and not settings.words):
            return self.say(f"{replica.name}: nobody answers at {replica.url} yet")
        replica.url = replica.url or f"http://127.0.0.1:{port}"
        log = log_of(settings, self.folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        own = {name: str(value) for name, value in settings.environment.items()}
        environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ, **own}
        with open(log, "ab") as out:
            self.processes[replica.name] = children.start(kind.command(settings, port), out, environment)
        self.say(f"{replica.name}: starting at {replica.url}; its log: {log}")

    async def _look_on(self, replica: Replica) -> None:
        while True:
            try:
                await self.look(replica)
                self.looked()
            except Exception as error:  # what one backend answers must not end the looks at it
                self.say(f"{replica.name}: {type(error).__name__}: {error}")
            self._say_once_if_ended(replica)
            await asyncio.sleep(POLL_SECONDS if replica.vllm or replica.state is not State.up else OTHERS_SECONDS)

    def _say_once_if_ended(self, replica: Replica) -> None:
        if replica.name in self._said or not self.ended(replica):
            return
        self._said.add(replica.name)
        code = self.processes[replica.name].returncode
        log = log_of(replica.settings, self.folder)
        end = "".join(terminal.last_lines(log, 1)).strip() or "nothing"
        self.say(f"{replica.name}: its server ended with exit code {code}; its log {log} ends with: {end}")

    async def look(self, replica: Replica) -> None:
        """Ask a backend how it is; a new one is warmed up before it takes requests."""
        was = replica.state
        try:
            if replica.vllm:
                await self.upstream.get(replica, "/health")
            elif replica.state is State.up:
                return await self._learn_models(replica)
            if replica.state in (State.starting, State.down):
                await self._learn_models(replica)
                replica.state = State.warming
                ahead = [task for one, task in self._warming.items() if one in replica.neighbours]
                self._warming[replica] = asyncio.ensure_future(self._warm(replica, ahead))
                try:
                    await self._warming[replica]
                finally:
                    del self._warming[replica]
                replica.came_up()
                self.say(f"{replica.name}: up, serves {', '.join(replica.models)}")
        except (BackendFailed, *NO_LIST) as error:
            if was is State.up:
                self.say(f"{replica.name}: down: {error}")
            replica.state = State.starting if was is State.starting else State.down
            return
        except Exception:  # nothing is known of it
            replica.state = was
            raise
        if replica.vllm:
            with suppress(BackendFailed):
                await self._read_metrics(replica)

    async def _listed(self, replica: Replica) -> tuple[str, ...]:
        """The models that it serves; where it has no list of them, the one that is named."""
        named = replica.settings.model
        try:
            raw = await self.upstream.get(replica, "/v1/models")
        except BackendFailed as error:
            if named is None or error.status not in UNLISTED:
                raise
            return (named,)
        return (named,) if named else tuple(str(entry["id"]) for entry in loads(raw)["data"])

    async def _learn_models(self, replica: Replica) -> None:
        replica.models = await self._listed(replica)
        replica.model = replica.models[0]
        quantised = " quantised" if BACKENDS[replica.settings.kind].changes_weights else ""
        replica.weights = replica.settings.weights or f"{replica.model}{quantised}"

    async def _warm(self, replica: Replica, ahead: Sequence[asyncio.Task[None]]) -> None:
        """A few short requests: what is compiled or loaded at first use is no user's wait, and the times of the others
        are the first that are known, so that no user's request has to find them out. vLLM only: others are paid.
        ahead: warm-ups on its host that began before; two at once would slow each other down."""
        if not replica.vllm:
            return
        if ahead:
            await asyncio.wait(ahead, timeout=WARM_SECONDS)
        words, times = itertools.count(), []  # each word once, so that nothing is cached
        with suppress(Exception):  # a model for embeddings alone has no completions
            for count, learnt in ((1, False), *((1, True),) * FEW, (WARM_TOGETHER, False), (WARM_TOGETHER, True)):
                prompts = [" ".join(str(next(words)) for _ in range(WARM_WORDS)) for _ in range(count)]
                found = await asyncio.gather(*(self._timed(replica, prompt) for prompt in prompts))
                times += [(count, len(prompts[0]) / 4, *both) for both in found if learnt]
                if count == 1 and (not learnt or replica.load.drafts):
                    await self._read_metrics(replica)
        for count, tokens, ttft, tpot in times:
            if count == 1:
                replica.timing.learn_ttft(tokens, 0.0, ttft)
            replica.learn_tpot(count, tpot)

    async def _timed(self, replica: Replica, prompt: str) -> tuple[float, float]:
        """Seconds to the first token of a stream, and for each further one."""
        body = {"model": replica.model, "max_tokens": WARM_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "prompt": prompt}
        began = first = last = time.monotonic()
        sent = await prepared(self.upstream, replica, "/v1/completions", body)
        limit = self.upstream.limits.first_byte_seconds
        async with asyncio.timeout(limit), self.upstream.post(replica, "/v1/completions", sent, {}) as response:
            while await self.upstream.part(response, limit):
                last = time.monotonic()
                first = last if first == began else first
        return first - began, (last - first) / (WARM_TOKENS - 1)

    async def _read_metrics(self, replica: Replica) -> None:
        before = replica.look()
        replica.looked(before, read((await self.upstream.get(replica, "/metrics")).decode(errors="replace")))
