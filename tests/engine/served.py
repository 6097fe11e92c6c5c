"""Servers started by `selfspec serve`, for as long as a test wants them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from selfspec_cli import children
from selfspec_cli.engine.server import free_port

START_SECONDS = 480  # two processes import vLLM one after the other
# These servers are eager. What vLLM compiles all the same is a small function for log-probabilities, for half a minute.
NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
ENGINE_FORKED = {"SELFSPEC_TESTS_FORK": "1"}  # one import of vLLM fewer: tests/processes/sitecustomize.py
ONE_PROCESS_FEWER = ["--distributed-executor-backend", "uni"]  # the engine's worker in the engine's own process
LIMITS = ["model.max_model_len=512", "engine.enforce_eager=true", "engine.max_num_seqs=4", "engine.kv_cache_gib=0.125"]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of one of a server's metrics over those of its series that have these labels."""
    text = httpx.get(f"{url}/metrics").text
    series = re.findall(rf"^vllm:{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    values = [float(value) for found, value in series if all(one in found for one in wanted)]
    assert values, (name, labels)
    return sum(values)


@contextmanager
def served(
    folder: Path, words: Sequence[str], options: Sequence[str] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """(process, address, log) of `selfspec serve WORDS -- OPTIONS` once it answers; it is gone afterwards, and so is
    the process of its engine, which outlives a server that a test kills."""
    port, log = free_port(), folder / "server.log"
    command = ["serve", *words, *LIMITS, "--", "--port", str(port), "--host", "127.0.0.1", *ONE_PROCESS_FEWER, *options]
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "selfspec_cli", *command],
            stdout=out,
            stderr=out,
            cwd=folder,
            env=inherited | NOTHING_COMPILED | environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, log, process)
        yield process, url, log
    finally:
        children.end(process, signal.SIGINT, 120)


def wait_for(done: Callable[[], bool], what: str | Path, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until `done`, which may be refused a connection; fails after a long time, or when the process has ended,
    with `what`, or that file's end."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and (process is None or process.poll() is None):
        with suppress(httpx.HTTPError):
            if done():
                return
        time.sleep(0.1)
    pytest.fail(what.read_text()[-3000:] if isinstance(what, Path) else f"waited in vain: {what}")
