"""A vLLM server as a process of its own, and what is asked of a server beside completions: its model, its metrics."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli import children, interrupts
from selfspec_cli.children import free_port
from selfspec_cli.config.facts import exit_layer
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.engine import cores
from selfspec_cli.engine.deployment import deployment
from selfspec_cli.terminal import last_lines

START_SECONDS = 1800.0
STOP_SECONDS, GIVE_UP_SECONDS = 120.0, 5.0  # for a server that has answered, and for one that still starts
POLL_SECONDS = 0.25
ANSWER_SECONDS = 60.0  # for anything but a completion
MIB = 2**20


class ServerError(RuntimeError):
    """A server did not start, or ended."""


@dataclass
class Server:
    """A server that was started here. model: what it calls its model. log: where its output goes."""

    url: str
    model: str
    cfg: RunConfig
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def layer(self) -> int | None:
        """The exit layer in force; None where there is none, or it is not known."""
        return exit_layer(self.cfg) if self.cfg.method is Method.layer_skip else None

    def set_gate(self, kind: str, threshold: float | None) -> None:
        """Change the gate between two rounds; nothing is reloaded."""
        self.call("early_exit_set_gate", kind, threshold)

    def call(self, method: str, *args: Any) -> Any:
        """The first worker's answer to one of `EarlyExitWorker`'s methods."""
        answer = ask(f"{self.url}/collective_rpc", {"method": method, "args": list(args)})
        return json.loads(answer)["results"][0] if answer else None

    def metrics(self) -> dict[str, dict[str, float]]:
        """The server's Prometheus metrics: name -> labels as they stand -> value; empty for a server without them."""
        metrics: dict[str, dict[str, float]] = {}
        try:
            text = ask(f"{self.url}/metrics")
            for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? (\S+)$", text, re.MULTILINE):
                metrics.setdefault(name, {})[labels] = float(value)
        except (OSError, ValueError):
            return {}
        return metrics

    def verify_counts(self) -> VerifyCounts | None:
        """vLLM's counters of speculative decoding since the server started; None for one that does not draft."""
        metrics = self.metrics()
        found = {
            name: metrics.get(f"vllm:spec_decode_num_{name}_total", {})
            for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        }
        if not found["drafts"]:
            return None
        by_position: Counter[int] = Counter()
        for labels, value in found.pop("accepted_tokens_per_pos").items():
            if position := re.search(r'position="(\d+)"', labels):
                by_position[int(position[1])] += int(value)
        rounds, places, accepted = (int(sum(values.values())) for values in found.values())
        return VerifyCounts(rounds, places, accepted, [by_position[number] for number in sorted(by_position)])

    def drafting(self) -> counters.Snapshot | None:
        """The draft loop's own counters; None for a server that has none."""
        return self.call("early_exit_counters") if self.cfg.method is Method.layer_skip else None

    def processes(self) -> list[tuple[int, str, list[str]]]:
        """Those of `cores.processes` that are of the server's session, which began with it."""
        return [one for one in cores.processes() if int(one[2][3]) == self.process.pid]

    def resident_mib(self) -> float | None:
        """Resident memory of the processes, shared pages counted once for each; None where /proc does not say."""
        pages = sum(int(fields[21]) for _, _, fields in self.processes())
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB if pages else None

    def cpu_seconds(self) -> dict[str, float]:
        """Seconds of a processor that the server has used, by the names of its processes."""
        ticks, by_process = os.sysconf("SC_CLK_TCK"), defaultdict[str, float](float)
        for _, name, fields in self.processes():
            by_process[name] += (int(fields[11]) + int(fields[12])) / ticks
        return by_process

    def check(self) -> None:
        """Raises ServerError if the server has ended."""
        if (code := self.process.poll()) is not None:
            raise ServerError(f"the server ended with exit code {code}{tail(self.log)}")


@contextmanager
def open_server(
    cfg: RunConfig, more: Sequence[str], log: Path, scratch: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server for `cfg` on this machine alone, give it when it answers, and end it. more: options of vLLM's.
    log: of its output. scratch: a folder that lasts. environment: further variables. Raises ConfigError, HeadError:
    what `cfg` asks for cannot be had; ServerError, with the end of the log: it ended, or did not answer."""
    made, port = deployment(cfg, scratch), str(free_port())
    cache = "--enable-prefix-caching" if cfg.engine.enable_prefix_caching else "--no-enable-prefix-caching"
    # vLLM's development mode lets this command read the draft loop's counters.
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = children.start(
            [*made.command(), cache, "--host", "127.0.0.1", "--port", port, *more],
            out,
            os.environ | own | made.environment | dict(environment or {}),
        )
    server, patience = Server(f"http://127.0.0.1:{port}", "", cfg, process, log), GIVE_UP_SECONDS
    try:
        wait_for(server.url, server.check, log)
        patience = STOP_SECONDS  # until here nothing is lost, and vLLM drops a signal while it waits for its engine
        server.model = str(json.loads(ask(f"{server.url}/v1/models"))["data"][0]["id"])
        yield server
    finally:
        children.end(process, signal.SIGINT, patience)


def listening_error(host: str, port: int) -> OSError | None:
    """Why a server could not listen at this address; None where it could. An empty host is every address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            return error
    return None


def ask(url: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> str:
    """The text of an answer; raises OSError for an error and where nobody answers. body: posted as JSON."""
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=seconds) as answer:
        return str(answer.read().decode())


def wait_for(url: str, check: Callable[[], None], log: Path, name: str = "the server") -> None:
    """Wait until a server answers; raises ServerError if it does not in time, and what `check` raises meanwhile."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        interrupts.check()
        check()
        with suppress(OSError):
            ask(f"{url}/health", seconds=2.0)
            return
        time.sleep(POLL_SECONDS)
    raise ServerError(f"{name} did not answer within {START_SECONDS / 60:.0f} minutes{tail(log)}")


def tail(log: Path) -> str:
    """The lines of a log that say what went wrong, and where it is."""
    lines = last_lines(log, 200)
    logged = re.compile(r"\b(DEBUG|INFO|WARNING)\b")  # a warning may name an error that has not happened
    errors = [line for line in lines if re.search(r"Error|error,|error:|FATAL|refus", line) and not logged.search(line)]
    chosen = [re.sub(r"^.*?(?=\w*Error)", "", line, count=1) for line in errors[-2:] or lines[-2:]]
    return f": {' · '.join(line.strip()[:200] for line in chosen)}; all of it: {log}"
