"""Backends over time: started or adopted, found healthy, warmed up, looked at once a second, ended."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from selfspec_cli import children, terminal
from selfspec_cli.gateway import packed
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.backends.base import environment, log_of, without_v1
from selfspec_cli.gateway.load import Counts, between, read
from selfspec_cli.gateway.replica import Replica, State
from selfspec_cli.gateway.settings import BackendSettings
from selfspec_cli.gateway.timing import FEW
from selfspec_cli.gateway.upstream import BackendFailed, Upstream, address, key_of, prepared

POLL_SECONDS = 1.0  # between two looks at a vLLM server's /health and /metrics
OTHERS_SECONDS = 10.0  # likewise at the models of any other backend
ANSWER_SECONDS = 5.0
UNLISTED = (400, 404, 405, 501)  # of HTTP: it has no /v1/models
STOP_SECONDS = 20.0
WARM_TOKENS, WARM_WORDS = 8, 16  # of each of the first requests
WARM_TOGETHER = 4  # of them at once: what one more costs is known before many come


def replica(settings: BackendSettings) -> Replica:
    """The backend of these settings, before anything is known of it."""
    kind = BACKENDS[settings.kind]
    url = settings.url or ""
    return Replica(settings, vllm=kind.vllm, url=without_v1(url) if kind.vllm else url, model=settings.model or "")


class Supervisor:
    """Starts what has to be started, and looks after all backends.

    folder: for the logs of servers. looked: called after each look. say: called with messages for people.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        upstream: Upstream,
        folder: Path,
        looked: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.replicas, self.upstream, self.folder = list(replicas), upstream, folder
        self.looked, self.say = looked, say
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.counts: dict[str, Counts] = {}
        self._ended: set[str] = set()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._retired: dict[subprocess.Popen[bytes], asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Start servers that do not run, and begin to look at all."""
        await self.take(self.replicas)

    async def take(self, replicas: Sequence[Replica]) -> None:
        """Look after these backends from now on: start what is new, and end the servers of those that are gone
        once the requests there have ended."""
        gone = [one for one in self._tasks if one not in replicas]
        self.replicas = list(replicas)
        for one in gone:
            one.draining = True
            self._tasks.pop(one).cancel()
            if process := self.processes.pop(one.name, None):
                self._retired[process] = asyncio.ensure_future(self._retire(one, process))
        for one in self.replicas:
            if one not in self._tasks:
                await self._start(one)
                self._tasks[one] = asyncio.ensure_future(self._look_on(one))

    async def close(self) -> None:
        """End the servers that were started here; those that were adopted go on."""
        for task in self._tasks.values():
            task.cancel()
        for task in self._retired.values():
            task.cancel()
        await self._end([*self.processes.values(), *self._retired])

    async def _retire(self, one: Replica, process: subprocess.Popen[bytes]) -> None:
        while one.flights:
            await asyncio.sleep(POLL_SECONDS)
        await self._end([process])

    async def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        await asyncio.gather(*(asyncio.to_thread(children.end, one, signal.SIGINT, STOP_SECONDS) for one in processes))

    async def ready(self, seconds: float, names: Sequence[str] = ()) -> bool:
        """Wait until these backends (all, where none are named) take requests; False where they do not in time."""
        until = time.monotonic() + seconds
        wanted = [one for one in self.replicas if not names or one.name in names]
        while time.monotonic() < until:
            if all(one.state is State.up for one in wanted):
                return True
            if any((process := self.processes.get(one.name)) and process.poll() is not None for one in wanted):
                return False
            await asyncio.sleep(0.1)
        return False

    async def _start(self, one: Replica) -> None:
        kind, settings = BACKENDS[one.settings.kind], one.settings
        if one.url and await self._answers(one):
            return self.say(f"{one.name}: answers at {one.url}")
        port = (urlsplit(one.url).port if one.url else None) or _free_port()
        local = not one.url or urlsplit(one.url).hostname in ("127.0.0.1", "localhost")
        command = kind.command(settings, port) if local and (settings.words or not one.url) else None
        if command is None:
            return self.say(f"{one.name}: nobody answers at {one.url} yet")
        one.url = one.url or f"http://127.0.0.1:{port}"
        log = log_of(settings, self.folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.processes[one.name] = children.start(command, out, environment(settings))
        self.say(f"{one.name}: starting at {one.url}; its log: {log}")

    async def _answers(self, one: Replica) -> bool:
        try:
            await self._listed(one)
        except (BackendFailed, ValueError, KeyError, TypeError, IndexError):
            return False
        return True

    async def _look_on(self, one: Replica) -> None:
        while True:
            try:
                await self.look(one)
                self.looked()
            except Exception as error:  # what one backend answers must not end the looks at it
                self.say(f"{one.name}: {type(error).__name__}: {error}")
            self._say_once_if_ended(one)
            await asyncio.sleep(POLL_SECONDS if one.vllm or one.state is not State.up else OTHERS_SECONDS)

    def _say_once_if_ended(self, one: Replica) -> None:
        process = self.processes.get(one.name)
        if process is None or process.poll() is None or one.name in self._ended:
            return
        self._ended.add(one.name)
        log = log_of(one.settings, self.folder)
        end = "".join(terminal.last_lines(log, 1)).strip() or "nothing"
        self.say(f"{one.name}: its server ended with exit code {process.returncode}; its log {log} ends with: {end}")

    async def look(self, one: Replica) -> None:
        """Ask a backend how it is; a new one is warmed up before it takes requests."""
        was = one.state
        try:
            if one.vllm:
                await self.upstream.get(f"{one.url}/health", ANSWER_SECONDS, key_of(one))
            elif one.state is State.up:
                return await self._learn_models(one)
            if one.state in (State.starting, State.down):
                await self._learn_models(one)
                one.state = State.warming
                await self._warm(one)
                one.came_up()
                self.say(f"{one.name}: up, serves {', '.join(one.models)}")
        except (BackendFailed, ValueError, KeyError, TypeError, IndexError) as error:
            if was is State.up:
                self.say(f"{one.name}: down: {error}")
            one.state = State.starting if was is State.starting else State.down
            return
        except Exception:  # nothing is known of it
            one.state = was
            raise
        if one.vllm:
            with suppress(BackendFailed):
                await self._read_metrics(one)

    async def _listed(self, one: Replica) -> tuple[str, ...]:
        """The models that it serves; where it has no list of them, the one that is named."""
        named = one.settings.model
        try:
            raw = await self.upstream.get(address(one.url, "/v1/models"), ANSWER_SECONDS, key_of(one))
        except BackendFailed as error:
            if named is None or error.status not in UNLISTED:
                raise
            return (named,)
        return (named,) if named else tuple(str(entry["id"]) for entry in packed.loads(raw)["data"])

    async def _learn_models(self, one: Replica) -> None:
        one.models = await self._listed(one)
        one.model = one.models[0]
        quantised = " quantised" if BACKENDS[one.settings.kind].changes_weights else ""
        one.weights = one.settings.weights or f"{one.model}{quantised}"

    async def _warm(self, one: Replica) -> None:
        """A few short requests: what is compiled or loaded at first use is no user's wait, and the times of the others
        are the first that are known, so that no user's request has to find them out. vLLM only: others are paid."""
        if not one.vllm:
            return
        words, times = itertools.count(), []
        with suppress(Exception):  # a model for embeddings alone has no completions
            for count, learnt in ((1, False), *((1, True),) * FEW, (WARM_TOGETHER, False), (WARM_TOGETHER, True)):
                prompts = [
                    " ".join(str(next(words)) for _ in range(WARM_WORDS)) for _ in range(count)
                ]  # none is cached
                found = await asyncio.gather(*(self._timed(one, prompt) for prompt in prompts))
                times += [(count, len(prompts[0]) / 4, *both) for both in found if learnt]
                if count == 1 and (not learnt or one.load.drafts):
                    await self._read_metrics(one)
        for count, tokens, ttft, tpot in times:
            if count == 1:
                one.timing.learn_ttft(tokens, 0.0, ttft)
            one.timing.learn_tpot(count, one.load.work, one.load.tokens, tpot)

    async def _timed(self, one: Replica, prompt: str) -> tuple[float, float]:
        """Seconds to the first token of a stream, and for each further one."""
        body = {
            "model": one.model,
            "max_tokens": WARM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "prompt": prompt,
        }
        began = first = last = time.monotonic()
        sent = await prepared(self.upstream, one, "/v1/completions", body)
        limit = self.upstream.limits.first_byte_seconds
        async with asyncio.timeout(limit), self.upstream.post(one, "/v1/completions", sent, {}) as response:
            while await self.upstream.part(response, limit):
                last = time.monotonic()
                first = last if first == began else first
        return first - began, (last - first) / (WARM_TOKENS - 1)

    async def _read_metrics(self, one: Replica) -> None:
        before = one.look()
        text = (await self.upstream.get(f"{one.url}/metrics", ANSWER_SECONDS, key_of(one))).decode(errors="replace")
        counts = read(text)
        one.looked(before, between(self.counts.get(one.name), counts, one.load))
        self.counts[one.name] = counts


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
