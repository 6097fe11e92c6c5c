"""Several independent servers of one model behind one address: started, watched and ended together.

Under vLLM's data parallelism draft loops of ranks would wait for each other, so replicas are servers that know nothing
of each other. In front of them is vllm-router, or where that is not installed the gateway.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from selfspec_cli import children, interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest, nearest
from selfspec_cli.engine.deployment import Deployment
from selfspec_cli.engine.server import ServerError, free_port, tail, wait_for
from selfspec_cli.stages.launch import work

ROUTERS = ("vllm-router", "gateway")
RESTARTS = 3  # deaths of one replica after which it is left alone
STOP_SECONDS, LOOK_SECONDS = 60.0, 1.0
HOST, PORT = "0.0.0.0", "8000"  # vLLM's own
KEY = "VLLM_API_KEY"  # variable in which vLLM, and the gateway in front of it, find a server's key
OF_ONE_SERVER = ("--uds", "--grpc", "--grpc-port", "--headless", "--ssl-keyfile", "--ssl-certfile")
"""Options of vLLM's by which a server is not reached by plain HTTP at a port of its own."""

Say = Callable[[str], None]


@dataclass
class Program:
    """A server to start. environment: variables beside those of this process."""

    name: str
    command: list[str]
    url: str
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0

    @property
    def dead(self) -> bool:
        """Whether it was started and has ended."""
        return self.process is not None and self.process.poll() is not None

    def log(self, folder: Path) -> Path:
        return folder / f"{self.name}.log"


def asked(words: Sequence[str]) -> tuple[int, str | None, list[str]]:
    """What a command says of replicas: how many, the router that is named, and all other words; raises ConfigError."""
    own: dict[str, str] = {}
    others = []
    for word in words:
        name, _, value = word.partition("=")
        if name in ("replicas", "router"):
            own[name] = value
        elif nearest(name, ("replicas", "router"), alike=0.8):  # the settings of a model know nothing of these two
            raise ConfigError(closest(name, ("replicas", "router"), "key", further=" and the settings of a run"))
        else:
            others.append(word)
    text, router = own.get("replicas", "1"), own.get("router")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"replicas={text}: allowed: a whole number, at least 1")
    if router and int(text) == 1:
        raise ConfigError(f"router={router}: one server has no router; give replicas=2 or more")
    return int(text), router, others


def plan(
    made: Deployment, cfg: RunConfig, more: Sequence[str], count: int, router: str | None
) -> tuple[list[Program], Program]:
    """The replicas of `made`, and what stands in front of them. Raises ConfigError: more replicas than GPUs, no such
    router, or an option that replicas cannot have. more: options of vLLM's server; --host and --port are the front's.
    router: vllm-router, a path of that program, or gateway; None takes vllm-router where it is installed."""
    for name in (word.partition("=")[0] for word in more):
        if name.replace("_", "-") in OF_ONE_SERVER:
            raise ConfigError(
                f"-- {name}: {count} servers behind a router answer by plain HTTP, each at a port of its "
                "own; leave it out, or start one server"
            )
    options, host, port, keys = _address(more)
    if not (port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"-- --port {port}: allowed: a whole number from 0 to 65535")
    if int(port) == 0:
        port = str(free_port())
    replicas = []
    for number, place in enumerate(_places(cfg, count)):
        own = str(free_port())
        command = [*made.command(), *options, "--host", "127.0.0.1", "--port", own]
        replicas.append(Program(f"replica{number}", command, f"http://127.0.0.1:{own}", made.environment | place))
    command, environment = _front([one.url for one in replicas], router, host, port, keys)
    reached = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return replicas, Program("router", command, f"http://{reached}:{port}", environment)


def _address(more: Sequence[str]) -> tuple[list[str], str, str, list[str]]:
    """vLLM's options without --host and --port, these two, and the keys that a server with these options answers to."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", nargs="?", default=HOST)
    parser.add_argument("--port", nargs="?", default=PORT)
    asked, options = parser.parse_known_args(list(more))
    parser.add_argument("--api-key", "--api_key", nargs="*", default=[])
    given = parser.parse_known_args(options)[0].api_key or [os.environ.get(KEY, "")]
    return options, asked.host or "", asked.port or "", [key for key in dict.fromkeys(given) if key]


def _places(cfg: RunConfig, count: int) -> list[dict[str, str]]:
    """The variables that give each replica its own GPUs, or its share of the cores."""
    if device_of(cfg) == "cpu":
        cores = work.own_cores()
        if count > len(cores):
            raise ConfigError(
                f"replicas={count}: this machine has {len(cores)} processor cores; allowed: up to {len(cores)}"
            )
        shares = [cores[number::count] for number in range(count)]
        return [{"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, share))} for share in shares]
    each, cards = cfg.model.tensor_parallel_size, len(machine.visible_gpus())
    if count * each > cards:
        needed = f"{count} x model.tensor_parallel_size={each} GPUs" if each > 1 else f"{count} GPUs"
        raise ConfigError(
            f"replicas={count}: {needed} are needed, and {cards} can be seen; allowed: up to {cards // each}"
        )
    names = work.gpu_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), cards)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[number * each :][:each])} for number in range(count)]


def _front(
    urls: Sequence[str], router: str | None, host: str, port: str, keys: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """A router's command and variables. keys: of the servers; the gateway wants one of them of its clients."""
    if router is None:
        router = ROUTERS[0] if shutil.which(ROUTERS[0]) else "gateway"
    if router == "gateway":
        # Equals need no baseline to compare the others with.
        settings = [f"host={host}", f"port={port}", "ledger.plain_share=0"]
        for number, url in enumerate(urls):
            settings += [f"backends.{number}.{key}" for key in (f"name=replica{number}", "kind=local", f"url={url}")]
            settings += [f"backends.{number}.key_env={KEY}"] if keys else []
        for number, key in enumerate(keys):
            digest = hashlib.sha256(key.encode()).hexdigest()
            settings += [f"keys.{number}.{one}" for one in (f"name=key{number}", f"key='{digest}'", "admin=true")]
        return [sys.executable, "-m", "selfspec_cli", "gateway", *settings], {KEY: keys[0]} if keys else {}
    if router not in ROUTERS and "/" not in router:
        raise ConfigError(closest(router, ROUTERS, "router") + "; or the path of a vllm-router")
    if shutil.which(router) is None:
        raise ConfigError(
            f"router={router}: there is no program {router!r}: pip install vllm-router in an environment of its own, "
            "and give the path of the program"
        )
    return [router, "--worker-urls", *urls, "--host", host, "--port", port, "--policy", "power_of_two"], {}


def serve(replicas: Sequence[Program], front: Program, folder: Path, say: Say) -> None:
    """Start all, say when they answer, start again what dies, and end all at an interrupt. folder: for their logs.
    Raises ServerError: a replica ended before it ever answered, none is left, or the router ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with interrupts.by_sigterm():
        try:
            for one in replicas:
                _start(one, folder, say)
            for one in replicas:
                _until_it_answers(one, replicas, folder)
                say(f"{one.name}: answers at {one.url}")
            _start(front, folder, say)
            _until_it_answers(front, [front], folder)
            say(f"{len(replicas)} replicas answer at {front.url}; Ctrl-C ends them all")
            while True:
                time.sleep(LOOK_SECONDS)
                look(replicas, front, folder, say)
        except KeyboardInterrupt:
            say("ending the router and the replicas")
        finally:
            end([front, *replicas])


def look(replicas: Sequence[Program], front: Program, folder: Path, say: Say) -> None:
    """Start a replica that has died again. Raises ServerError where the router has ended, or no replica is left."""
    if front.dead:
        raise ServerError(f"the router ended{tail(front.log(folder))}")
    for replica in replicas:
        if replica.process is None or not replica.dead:
            continue
        replica.deaths += 1
        again = replica.deaths <= RESTARTS
        say(
            f"{replica.name}: ended with exit code {replica.process.returncode}"
            + ("; it is started again" if again else f" for the {replica.deaths}th time, and is left alone")
        )
        children.end(replica.process, signal.SIGKILL, 0)  # what its session has left
        replica.process = None
        if again:
            _start(replica, folder, say)
    if not any(replica.process for replica in replicas):
        raise ServerError(f"no replica is left; their logs are in {folder}")


def end(programs: Sequence[Program]) -> None:
    """End what runs: all are asked at once, and then waited for."""
    running = [program.process for program in programs if program.process is not None]
    for process in running:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        children.end(process, signal.SIGKILL, 0)


def _start(program: Program, folder: Path, say: Say) -> None:
    variables = {"VLLM_NO_USAGE_STATS": "1", **os.environ, **program.environment}
    with open(program.log(folder), "ab") as out:
        program.process = children.start(program.command, out, variables)
    say(f"{program.name}: starting; its log: {program.log(folder)}")


def _until_it_answers(program: Program, beside: Sequence[Program], folder: Path) -> None:
    def check() -> None:
        for other in beside:
            if other.dead:
                raise ServerError(f"{other.name} ended before it answered{tail(other.log(folder))}")

    wait_for(program.url, check, program.log(folder), program.name)
