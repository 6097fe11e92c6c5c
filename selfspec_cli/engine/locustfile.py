"""The clients of a load test, run by locust in a process of its own; `engine.clients` starts it.

locust replaces Python's sockets by gevent's, so this file imports nothing of selfspec or vLLM. SELFSPEC_LOAD names the
file of samples, and which requests of job.json beside it are asked here: every `step`th from `first` on. A sample is a
line of JSON for a request: its number, when it was sent and when each output arrived (microseconds of the machine's
monotonic clock; locust's own statistics are in milliseconds), how many tokens the server counted, and a digest of the
text. Each request has a connection of its own, because a server may close an idle one just when it is used again.
"""

import hashlib
import http.client
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

PART: dict[str, Any] = json.loads(os.environ["SELFSPEC_LOAD"])
OUT, FIRST, STEP = Path(PART["out"]), PART["first"], PART["step"]
JOB: dict[str, Any] = json.loads(OUT.with_name("job.json").read_text(encoding="utf-8"))
PATH, TIMEOUT = "/v1/completions", 600.0  # seconds that a client waits for a part of an answer
SERVER = urlsplit(JOB["url"]).netloc
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}
BODIES = [json.dumps(JOB["body"] | prompt).encode() for prompt in JOB["prompts"]]
ERROR_LENGTH = 300
READ_BYTES = 65536
UNFINISHED = ("error", "abort")  # reasons for which a server ends an answer that is not at its end
Part = tuple[float, bytes]


class Run:
    """What the clients of this process share: which request is next, and where samples go."""

    def __init__(self) -> None:
        self.taken = self.clients = 0
        self.began, self.cpu = time.monotonic(), time.process_time()
        self.active = len(range(FIRST, JOB["clients"] or STEP, STEP))
        self.out = open(OUT, "w", encoding="utf-8")  # noqa: SIM115 - until the last client has ended

    def wait(self) -> None:
        """Until the clients of all processes are ready; then until the moment that they begin at together."""
        if STEP == 1:
            return
        begin = OUT.with_name("begin")
        while not begin.exists():
            gevent.sleep(0.02)
        gevent.sleep(max(0.0, float(begin.read_text()) - time.monotonic()))

    def take(self) -> int | None:
        """The number of the next request of a closed loop; None when no more may begin."""
        number, limit = FIRST + self.taken * STEP, JOB["requests"]
        if (number >= limit) if limit is not None else (time.monotonic() - self.began >= JOB["seconds"]):
            return None
        self.taken += 1
        return int(number)

    def ended(self, environment: Environment) -> None:
        """A client has nothing more to do; the last one ends the run."""
        self.active -= 1
        if self.active == 0:
            used = {"client_cpu_s": time.process_time() - self.cpu, "client_s": time.monotonic() - self.began}
            self.out.write(json.dumps(used) + "\n")
            self.out.close()
            assert environment.runner is not None
            gevent.spawn(environment.runner.quit)  # it waits for the clients, of which this is one

    def ask(self, number: int, late: float = 0.0) -> None:
        """One request, to its end. late: seconds that it was sent after its time."""
        sample: dict[str, Any] = {"number": number, "late_us": round(1e6 * late)}
        sent, error = time.monotonic(), None
        parts: list[Part] = []
        connection = http.client.HTTPConnection(SERVER, timeout=TIMEOUT)
        try:
            connection.request("POST", PATH, BODIES[number % len(BODIES)], HEADERS)
            response = connection.getresponse()
            if response.status == 200:
                _receive(response, parts)
            else:
                error = f"HTTP {response.status}: {response.read().decode(errors='replace')[:ERROR_LENGTH]}"
        except Exception as problem:  # of the network, and of what came over it: a failed request and no failed run
            error = f"{type(problem).__name__}: {problem}"[:ERROR_LENGTH]
        finally:
            connection.close()
        sample |= _read(parts)
        whole, error = sample.pop("whole"), sample.pop("failure") or error
        if error is None and not whole:
            error = "the stream broke off before its end"
        if error is None and not sample["events_us"]:
            error = "no output came"
        if error is None and sample["tokens"] is None:
            error = "the server counted no tokens"
        sample |= {"sent_us": round(1e6 * sent), "error": error}
        self.out.write(json.dumps(sample) + "\n")
        self.out.flush()


def _receive(response: http.client.HTTPResponse, parts: list[Part]) -> None:
    """Every line of a stream with the moment at which it came; raises when the stream breaks off."""
    rest = b""
    while data := response.read1(READ_BYTES):  # at most what has come: never waits for more than there is
        moment = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        parts += [(moment, line) for line in lines if line.strip()]
    if rest.strip():
        parts.append((time.monotonic(), rest))


def _read(parts: list[Part]) -> dict[str, Any]:
    """What a stream held. tokens: None if not counted. whole: it ended as streams do. failure: the server's words."""
    moments, texts, whole, failures = [], [], False, []
    usage: dict[str, Any] = {}
    for moment, line in parts:
        name, _, data = line.partition(b":")
        data = data.strip()
        if name != b"data":
            if name.strip() not in (b"", b"event", b"id", b"retry"):  # a comment begins with the colon
                failures.append(f"no event: {_words(line)}")
            continue
        if data == b"[DONE]":
            whole = True
        elif data:
            try:
                written, counted, failure = _event(json.loads(data))
            except Exception:  # of any shape that a server may think of: the request failed, and the run goes on
                written, counted, failure = [], {}, f"an event that cannot be read: {_words(data)}"
            usage = counted or usage
            failures += [failure] if failure else []
            if written:
                moments.append(round(1e6 * moment))
                texts += written
    digest = hashlib.sha256("".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    counts = {"tokens": _count(usage.get("completion_tokens")), "prompt_tokens": _count(usage.get("prompt_tokens"))}
    return {"events_us": moments, "digest": digest, "whole": whole, "failure": next(iter(failures), None), **counts}


def _event(event: dict[str, Any]) -> tuple[list[str], dict[str, Any], str | None]:
    """What an event holds: texts, the server's count of tokens, and why the request failed; raises for other shapes."""
    written: list[str] = []
    failure = _failure(event)
    for choice in event.get("choices") or ():
        written.append("" + (choice.get("text") or ""))  # raises TypeError for what is no text
        if choice.get("finish_reason") in UNFINISHED:
            failure = failure or f"the server ended it with finish_reason {choice['finish_reason']}"
    usage = event.get("usage")
    return written, usage if isinstance(usage, dict) else {}, failure


def _failure(event: dict[str, Any]) -> str | None:
    """The words of an event that says that the request failed; vLLM, OpenAI and FastAPI shape them differently."""
    said = event.get("error")
    if not said and (event.get("object") == "error" or "choices" not in event):
        said = event.get("message") or event.get("detail")
    if not said:
        return None
    words = said.get("message") or said if isinstance(said, dict) else said
    return f"the server said: {words if isinstance(words, str) else json.dumps(words)}"[:ERROR_LENGTH]


def _words(data: bytes) -> str:
    return data.decode(errors="replace").strip()[:ERROR_LENGTH]


def _count(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    return value if type(value) is int and value >= 0 else None


RUN = Run()


class Client(User):
    """Of a closed loop, one of its clients; of an open loop, who sends all requests, each in a greenlet of its own."""

    @task
    def go(self) -> None:
        RUN.wait()
        if JOB["arrivals"] is None:
            if RUN.clients == 0:
                RUN.began, RUN.cpu = time.monotonic(), time.process_time()
            RUN.clients += 1
            while (number := RUN.take()) is not None:
                RUN.ask(number)
        else:
            RUN.began, RUN.cpu, sent = time.monotonic(), time.process_time(), []
            for number in range(FIRST, len(JOB["arrivals"]), STEP):
                moment = RUN.began + JOB["arrivals"][number]
                gevent.sleep(max(0.0, moment - time.monotonic()))
                sent.append(gevent.spawn(RUN.ask, number, max(0.0, time.monotonic() - moment)))
            gevent.joinall(sent)
        RUN.ended(self.environment)
        raise StopUser
