"""Clients that ask a server: locust as a process of its own, and the samples that it leaves.

A run is described by a `Job`, in plain values; `run` gives what came back, also of a run that an interrupt cut short.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.engine import children
from selfspec_cli.record.latency import RequestTimes
from selfspec_cli.terminal import last_lines

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MICRO = 1_000_000
POLL_SECONDS = 0.2
TELL_SECONDS = 1.0  # between two looks at how far a run is
STOP_SECONDS = 15.0
BUSY = 0.8  # share of one core above which the clients may be what is measured


class ClientsError(RuntimeError):
    """The clients could not run. The text has the end of their log."""


@dataclass(frozen=True)
class Job:
    """What to ask. Exactly one of clients (a closed loop) and arrivals (seconds from the beginning, rising) is given; a
    closed loop ends after `requests`, or begins no more requests after `seconds`.

    prompts: for each what the body of its request says besides `body`; request n asks the prompt n modulo their number.
    timeout: seconds that a client waits for a part of an answer.
    """

    url: str
    path: str
    body: Mapping[str, Any]
    prompts: Sequence[Mapping[str, Any]]
    clients: int | None = None
    arrivals: Sequence[float] | None = None
    requests: int | None = None
    seconds: float | None = None
    timeout: float = 600.0


@dataclass(frozen=True)
class Sample:
    """One request. sent, events: seconds of the machine's monotonic clock. late: seconds that it was sent after its
    time. tokens: counted by the server, or the outputs where it counts none. error: why it failed; None for one that
    ended well."""

    number: int
    sent: float
    events: tuple[float, ...]
    tokens: int
    prompt_tokens: int | None
    digest: str
    late: float
    error: str | None


@dataclass
class Run:
    """What came back. began: when the first request was sent. cpu: share of a core that the clients used; None for a
    run that was cut short. interrupted: it was. counted: the server counted its tokens."""

    samples: list[Sample] = field(default_factory=list)
    cpu: float | None = None
    interrupted: bool = False
    counted: bool = True

    @property
    def good(self) -> list[Sample]:
        """Requests that ended well, in the order in which they were sent."""
        return sorted((one for one in self.samples if one.error is None), key=lambda one: (one.sent, one.number))

    @property
    def failed(self) -> list[Sample]:
        """Requests that did not."""
        return [one for one in self.samples if one.error is not None]

    @property
    def began(self) -> float:
        """When the first request was sent."""
        return min(one.sent for one in self.samples)

    @property
    def seconds(self) -> float:
        """From the first request to the last output of all that ended well."""
        return max(one.events[-1] for one in self.good) - self.began

    def times(self) -> tuple[RequestTimes, ...]:
        """The raw times of the requests that ended well, from the run's beginning."""
        start = self.began
        return tuple(
            RequestTimes(one.sent - start, tuple(event - start for event in one.events), one.tokens)
            for one in self.good
        )


def run(
    job: Job, folder: Path, *, check: Callable[[], None], told: Callable[[int, float], None] = lambda *_: None
) -> Run:
    """Run a job to its end. Leaves job.json, samples.jsonl, clients.log and locust's own tables in `folder`.

    Args:
        check: called while the clients work; what it raises ends them. told: requests ended and seconds gone so far.

    Raises:
        ClientsError: locust is not installed, or failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    samples, log = folder / "samples.jsonl", folder / "clients.log"
    document = asdict(job) | {"out": str(samples.absolute())}
    (folder / "job.json").write_text(json.dumps(document), encoding="utf-8")
    users = str(job.clients or 1)
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless",
               "--host", job.url, "--users", users, "--spawn-rate", users, "--only-summary", "--csv",
               str(folder / "locust")]  # fmt: skip
    environment = os.environ | {"SELFSPEC_LOAD": str((folder / "job.json").absolute())}
    with open(log, "wb") as out:
        process = children.start(command, out, environment)
    interrupted = False
    try:
        _watch(process, samples, check, told)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        children.end(process, signal.SIGTERM, STOP_SECONDS)  # locust writes its tables first
    found = read(samples) if samples.is_file() else Run()
    found.interrupted = interrupted
    if process.returncode not in (0, 1) and not interrupted:  # 1: locust saw requests that failed
        raise ClientsError(_why(log))
    if not found.samples and not interrupted:
        raise ClientsError(_why(log))
    return found


def read(samples: Path) -> Run:
    """The run that a file of samples holds; a line that was cut off is left out."""
    found = Run()
    for line in samples.read_text(encoding="utf-8").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if "client_s" in one:
            found.cpu = one["client_cpu_s"] / max(one["client_s"], 1e-9)
            continue
        events = tuple(moment / MICRO for moment in one["events_us"])
        found.counted = found.counted and (one["tokens"] is not None or one["error"] is not None)
        found.samples.append(
            Sample(
                number=one["number"],
                sent=one["sent_us"] / MICRO,
                events=events,
                tokens=len(events) if one["tokens"] is None else one["tokens"],
                prompt_tokens=one["prompt_tokens"],
                digest=one["digest"],
                late=one["late_us"] / MICRO,
                error=one["error"],
            )
        )
    return found


def _watch(
    process: subprocess.Popen[bytes], samples: Path, check: Callable[[], None], told: Callable[[int, float], None]
) -> None:
    began = last = time.monotonic()
    ended, read_to = 0, 0
    while process.poll() is None:
        interrupts.check()
        check()
        if (now := time.monotonic()) - last >= TELL_SECONDS and samples.is_file():
            last = now
            with open(samples, "rb") as file:
                file.seek(read_to)
                new = file.read()
            ended, read_to = ended + new.count(b"\n"), read_to + len(new)
            told(ended, now - began)
        time.sleep(POLL_SECONDS)


def _why(log: Path) -> str:
    lines = last_lines(log, 100)
    if any("No module named locust" in line for line in lines):
        return "locust is not installed: pip install 'selfspec[load]'"
    return f"the clients failed: {' · '.join(line.strip()[:200] for line in lines[-3:])}; all of it: {log}"
