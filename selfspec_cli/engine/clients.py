"""Clients that ask a server: locust as a process of its own, and the samples that it leaves.

A run is described by a `Job`, in plain values; `run` gives what came back, also of a run that an interrupt cut short.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from selfspec_cli import children, interrupts
from selfspec_cli.engine.server import tail
from selfspec_cli.record.statistics import RequestTimes
from selfspec_cli.whole import atomic_write

MICRO = 1_000_000
POLL_SECONDS = 0.2
TELL_SECONDS = 1.0  # between two looks at how far a run is
STOP_SECONDS = 15.0
BEGIN, BEGIN_SECONDS = "begin", 0.5  # when several processes begin, in a file: after the last one is ready
ENDED = (0, 1)  # exit codes of locust; 1: a request failed, which the samples show
CLIENTS_A_PROCESS, CORES_A_PROCESS = 64, 4
BUSY = 0.8  # share of one core above which the clients may be what is measured


class ClientsError(RuntimeError):
    """The clients could not run. The text has the end of their log."""


@dataclass(frozen=True)
class Job:
    """What to ask. Exactly one of clients (a closed loop) and arrivals (seconds from the beginning, rising) is given; a
    closed loop ends after `requests`, or begins no more after `seconds`. prompts: what each adds to `body`; request n
    asks the prompt n modulo their number. processes: one reads no more than some 20,000 outputs a second."""

    url: str
    body: Mapping[str, Any]
    prompts: Sequence[Mapping[str, Any]]
    clients: int | None = None
    arrivals: Sequence[float] | None = None
    requests: int | None = None
    seconds: float | None = None
    processes: int = 1


@dataclass(frozen=True)
class Sample:
    """One request. sent, events: monotonic seconds. late: seconds after its time. tokens: the server's count."""

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
    """What came back. cpu: share of a core that the busiest process of the clients used; None if it was cut short."""

    samples: list[Sample] = field(default_factory=list)
    cpu: float | None = None
    interrupted: bool = False

    @property
    def good(self) -> list[Sample]:
        """Requests that ended well, in the order in which they were sent."""
        ended = (sample for sample in self.samples if sample.error is None)
        return sorted(ended, key=lambda sample: (sample.sent, sample.number))

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is not None]

    @property
    def began(self) -> float:
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


def processes_for(clients: int) -> int:
    """Processes for so many clients at once, on this machine: the server wants most of its cores."""
    return max(1, min(math.ceil(clients / CLIENTS_A_PROCESS), (os.cpu_count() or 1) // CORES_A_PROCESS))


def run(
    job: Job, folder: Path, *, check: Callable[[], None], progress: Callable[[int, float], None] = lambda *_: None
) -> Run:
    """Run a job to its end; raises ClientsError if locust failed. Leaves job.json, samples.jsonl and clients.log in a
    new `folder`. check: called meanwhile; what it raises ends the clients. progress: gets ended requests, seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    log, whole = folder / "clients.log", folder / "samples.jsonl"
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    count = max(1, min(job.processes, job.clients or len(job.arrivals or ()) or 1))
    parts = [whole, *(folder / f"samples{number}.jsonl" for number in range(1, count))]
    running: list[subprocess.Popen[bytes]] = []
    interrupted = False
    with open(log, "wb") as out:
        try:
            for number, part in enumerate(parts):
                running.append(_start(job, number, part, count, out))
            _watch(running, parts, check, progress)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for process in running:
                children.end(process, signal.SIGTERM, STOP_SECONDS)
    with open(whole, "a", encoding="utf-8") as samples:  # those of all processes, in one file from here on
        for part in parts[1:]:
            if part.is_file():
                samples.write(part.read_text(encoding="utf-8"))
                part.unlink()
    (folder / BEGIN).unlink(missing_ok=True)
    result = read(whole)
    result.interrupted = interrupted
    failed = any(process.returncode not in ENDED for process in running)
    if not interrupted and (failed or not result.samples):
        raise ClientsError(f"the clients failed{tail(log)}")
    return result


def _start(job: Job, number: int, out: Path, count: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    users = str(len(range(number, job.clients or count, count)))
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--headless", "--host", job.url, "--users", users, "--spawn-rate", users, "--only-summary"]
    part = {"out": str(out.absolute()), "first": number, "step": count}
    return children.start(command, log, os.environ | {"SELFSPEC_LOAD": json.dumps(part)})


def _watch(
    running: Sequence[subprocess.Popen[bytes]],
    parts: Sequence[Path],
    check: Callable[[], None],
    progress: Callable[[int, float], None],
) -> None:
    """Until all processes have ended, or one has failed. Several begin together, once all are ready."""
    began = last = time.monotonic()
    ended, waiting = 0, len(parts) > 1
    with ExitStack() as stack:
        samples: dict[Path, BinaryIO] = {}
        while any(process.poll() is None for process in running):
            interrupts.check()
            check()
            if any(process.poll() not in ((None,) if waiting else (None, *ENDED)) for process in running):
                return
            for part in parts:
                if part not in samples and part.is_file():
                    samples[part] = stack.enter_context(open(part, "rb"))
            if waiting and len(samples) == len(parts):
                atomic_write(parts[0].with_name(BEGIN), str(time.monotonic() + BEGIN_SECONDS))
                waiting = False
            if (now := time.monotonic()) - last >= TELL_SECONDS:
                last = now
                ended += sum(file.read().count(b"\n") for file in samples.values())
                progress(ended, now - began)
            time.sleep(POLL_SECONDS)


def read(samples: Path) -> Run:
    """The run that a file of samples holds; a line that was cut off is left out."""
    run = Run()
    for line in samples.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "client_s" in entry:
            run.cpu = max(run.cpu or 0.0, entry["client_cpu_s"] / max(entry["client_s"], 1e-9))
            continue
        same = {name: entry[name] for name in ("number", "prompt_tokens", "digest", "error")}
        events = tuple(moment / MICRO for moment in entry["events_us"])
        sent, late = entry["sent_us"] / MICRO, entry["late_us"] / MICRO
        run.samples.append(Sample(**same, sent=sent, events=events, tokens=entry["tokens"] or 0, late=late))
    return run
