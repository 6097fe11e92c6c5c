"""Replays a trace: requests come at the times that a file has, in Mooncake's form (JSON lines) or BurstGPT's (CSV).

Mooncake (kvcache-ai/Mooncake, FAST25-release/traces): `timestamp` in ms, `input_length`, `output_length`, and
`hash_ids`, one for each 512 tokens of the prompt; equal first ids are equal prefixes. BurstGPT (HPMLL/BurstGPT):
`Timestamp` in s, `Request tokens`, `Response tokens`, and others that are not used.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.load_patterns.base import LoadPattern

MOONCAKE = ("timestamp", "input_length", "output_length")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass
class TraceSettings:
    """The file, which `selfspec load` takes from workload.prompts: no setting of its own."""

    trace: str | None = None


@dataclass(frozen=True)
class Request:
    """A request. at: seconds after the first. input_len, output_len: tokens. blocks: ids of its prompt's, if any."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def is_trace(name: str) -> bool:
    """Whether a file is a trace, by its first line."""
    path = Path(name).expanduser()
    if path.suffix not in (".csv", ".jsonl") or not path.is_file():
        return False
    try:
        first = next(_rows(path), {})
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and set(_columns(path)) <= first.keys()


def asked_requests(load: Any) -> list[Request]:
    """Return the requests of one run, at least one: the first `load.requests` of the file, or those of its first
    `load.seconds`. With `load.rate` one factor changes all gaps, so that this is the mean rate, and a run of
    `load.seconds` has as many as fit in. Raises SettingsError: the file cannot be read, or its times do not rise."""
    rows = _requests(Path(load.trace).expanduser())
    if load.requests is not None or load.rate is not None:
        requests = list(islice(rows, load.requests or max(1, round(load.rate * load.seconds))))
    else:
        requests = list(takewhile(lambda request: request.at == 0 or request.at < load.seconds, rows))
    if not requests:
        raise SettingsError(f"workload.prompts={load.trace}: no request of this trace has a prompt and an answer")
    if load.rate is None or not requests[-1].at:
        return requests
    factor = (len(requests) - 1) / load.rate / requests[-1].at
    return [replace(request, at=request.at * factor) for request in requests]


def _requests(path: Path) -> Iterator[Request]:
    """Yield the requests of a file; those without a prompt or an answer, which had failed, are left out."""
    at, input_len, output_len = _columns(path)
    unit = 1.0 if path.suffix == ".csv" else 0.001
    first: float | None = None
    last = 0.0
    try:
        for number, row in enumerate(_rows(path), 1):
            request = Request(
                unit * float(row[at]), int(row[input_len]), int(row[output_len]), tuple(row.get("hash_ids") or ())
            )
            if request.input_len < 1 or request.output_len < 1:
                continue
            first = request.at if first is None else first
            if request.at - first < last:
                raise SettingsError(f"workload.prompts={path}: row {number} is earlier than the one before it")
            last = request.at - first
            yield replace(request, at=last)
    except SettingsError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingsError(
            f"workload.prompts={path}: a row cannot be read as {at}, {input_len} and {output_len}: {reason}"
        ) from error


def _columns(path: Path) -> tuple[str, str, str]:
    return BURSTGPT if path.suffix == ".csv" else MOONCAKE


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        else:
            yield from (json.loads(line) for line in file if line.strip())


class Trace(LoadPattern):
    name = "trace"
    help = "requests arrive when a trace says so (workload=trace); load.rate makes it faster or slower"
    settings = TraceSettings
    rank = 3

    def asked(self, load: Any) -> bool:
        return load.trace is not None and load.clients is None

    def problem(self, load: Any) -> str | None:
        if load.share is None and load.burst == 1:
            return None
        given = f"share={load.share:g}" if load.share is not None else f"burst={load.burst}"
        return (
            f"load.{given} with the trace {load.trace}: it says when requests arrive; load.rate=N makes it faster or "
            "slower, load.clients=N asks its requests in a closed loop"
        )

    def arrivals(self, load: Any, seed: int, requests: int | None, seconds: float | None) -> list[float]:
        return [request.at for request in asked_requests(load)]

    def values(self, load: Any) -> dict[str, Any]:
        return {"arrivals": f"{self.name} {Path(load.trace).name}", "rate": load.rate}

    def label(self, row: Any) -> str:
        return str(row.arrivals) + (f" ({row.rate:.3g} requests/s)" if row.rate is not None else "")


PATTERN = Trace()
