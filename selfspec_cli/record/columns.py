"""The columns of the tables that are made of points, and conditions on them.

`Summary` is the header of summary.csv, with what everybody reads. A point's key and id join the other tables to it:
`Details`, `Loads` and `quality.Quality`. `Record` is a point in all tables. A value that was not measured is an empty
cell (`None`), never 0. Of old points, columns that were removed are left out (`known`).
"""

import csv
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import ge, gt, le, lt
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record.point import OK
from selfspec_cli.record.quality import Quality


@dataclass
class Summary:
    """One arm, measured. Times are wall time; tok/s counts generated tokens only."""

    run_id: str  # the command that measured it
    time: str  # ISO 8601, with the offset from UTC
    arm: str  # baseline, layer_skip, skip, draft_model; vllm: by its own methods, see `speculative`
    model: str
    E: int | None = None  # exit layer
    k: int | None = None  # draft tokens a round, at most
    head: str | None = None
    vocab: str | None = None  # draft vocabulary
    draft_weights: str | None = None  # shared: the target's own; fp8, int8, int4: copies of them
    draft_weights_file: str | None = None  # that the copies came from; empty: they were rounded when the engine started
    skip_layers: str | None = None  # layers below E that do not draft
    draft_window: int | None = None  # last tokens of the context that drafts attend to
    draft_sample_method: str | None = None  # probabilistic: drafts are drawn; empty: they are the likeliest tokens
    gate: str | None = None
    threshold: float | None = None  # of the gate: probability (maxp) or nats squared (varH)
    length_table: str | None = None  # draft lengths by load and context, in place of k alone
    read_first: bool | None = None  # false: steps are launched before the last one's tokens are read, at every load
    runner: str | None = None  # vLLM's model runner, where one was asked for
    speculative: str | None = None  # of arm vllm: the method and its settings
    acceptance_length: float | None = None  # synthetic; empty: real acceptance
    workload: str | None = None
    batch: int | None = None  # requests in flight
    input_len: int | None = None  # tokens
    output_len: int | None = None  # tokens
    temperature: float | None = None
    tok_s_median: float | None = None  # generated tokens a second, all requests together
    tok_s_min: float | None = None
    tok_s_max: float | None = None
    speedup: float | None = None  # tok_s_median over that of the baseline that `baseline` names
    speedup_low: float | None = None  # 95 % interval of the speedup, by bootstrap over the repeats of both sides
    speedup_high: float | None = None
    predicted: float | None = None  # speedup by the cost model, from bytes read and the accepted length measured
    accept_rate: float | None = None  # accepted / drafted tokens; of an active request in a draft step, too
    mean_accepted_len: float | None = None  # tokens a verify step yields: 1 + accepted/rounds
    ttft_ms: float | None = None  # time to first token, median (`record.statistics` defines all of these)
    tpot_ms: float | None = None  # time for each output token after the first, median over requests
    ppl: float | None = None  # text, under the arm's own predictions: baseline and skip (`ppl_protocol` says how)
    delta_ppl: float | None = None  # minus the baseline's; of a verified arm, 0 if all outputs are equal
    identical: int | None = None  # outputs equal to the baseline's; of a baseline, to its own in another batch order
    outputs: int | None = None  # outputs compared
    weights_mib: float | None = None
    baseline: str | None = None  # id of the point that the speedup is over
    device: str | None = None  # in use: one GPU of eight is one GPU
    status: str = OK  # "ok", or "failed: reason"
    key: str = ""  # config.keys.run_key
    point: str = ""  # id: the file results/runs/<id>.json


@dataclass
class Details:
    """What explains a row: its run, percentiles, and what drafting and the engine took."""

    seed: int | None = None
    repeats: int | None = None
    draft_context: str | None = None  # what drafts attend to, where `draft_window` does not say it; empty: everything
    model_fingerprint: str | None = None
    efficiency: float | None = None  # speedup / predicted
    drafted_per_round: float | None = None  # draft tokens that a verify pass had before it, of one request
    free_drafts: int | None = None  # most tokens of a draft from the request's own prompt and output; empty: none
    free_drafted: int | None = None  # tokens copied from a request's prompt and output; the others are the model's own
    free_accepted: int | None = None  # of these
    itl_ms: float | None = None  # time between successive outputs of a request, median
    e2e_ms: float | None = None  # time to the last token, median
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    e2e_p99_ms: float | None = None
    peak_mem_mib: float | None = None  # while measuring: tensors on a GPU, else this process's resident memory
    kv_blocks: int | None = None  # of the KV cache
    sm_util: float | None = None  # share of the time that SMs were busy, 0 to 1 (NVML, mean over the repeats)
    power_w: float | None = None  # mean board power (NVML)
    cpu_own: float | None = None  # while timed, this command's share of the processor cores, 0 to 1
    cpu_others: float | None = None  # that of other programs, or of other guests of the machine


@dataclass
class Loads:
    """What a load test asked of a server, and what it found besides speed and latencies, which every point has."""

    arrivals: str | None = None  # of a load test: closed, poisson, bursty, or trace and the name of its file
    clients: int | None = None  # of a closed loop
    rate: float | None = None  # requests a second that arrive
    load_share: float | None = None  # the rate over what the baseline completes in a closed loop
    burst: int | None = None  # requests that arrive together
    failed_requests: int | None = None  # refused, broken off or without an output
    req_s: float | None = None  # requests that end in a second, median of the runs
    goodput: float | None = None  # requests a second that keep the stated limits of latency (`load.*_limit`),
    # median of the runs


OTHERS, TAKEN = 0.1, 0.75
"""Shares of the cores: what others may have while a point is timed, and what all have together where that slows it."""


def disturbed(cpu_own: float | None, cpu_others: float | None) -> bool:
    """Whether other programs had so much of the processor that what was timed meanwhile is not to be trusted."""
    return (cpu_others or 0) >= OTHERS and (cpu_others or 0) + (cpu_own or 0) >= TAKEN


@dataclass
class Record(Quality, Loads, Details, Summary):
    """One point in all tables; the columns of summary.csv come first."""


KINDS = {column.name: str(column.type) for column in fields(Record)}  # the type of each column, by its name


@dataclass
class AcceptRow:
    """Drafting of one arm, summed over the timed repeats; it belongs to the summary row of the same point."""

    run_id: str
    arm: str
    model: str
    E: int | None = None
    k: int | None = None
    head: str | None = None
    gate: str | None = None
    threshold: float | None = None
    batch: int | None = None
    rounds: int | None = None  # verify steps that had drafts (vLLM's counter)
    drafted: int | None = None  # tokens
    accepted: int | None = None  # tokens
    accepted_at: str | None = None  # tokens accepted at position 1..k, separated by spaces
    key: str = ""
    places: int | None = None  # that verify passes looked at (vLLM's counter)
    point: str = ""


COUNTED = ("rounds", "drafted", "accepted", "accepted_at", "places")  # the columns of accept.tsv that are counters


TABLES: dict[str, type] = {
    "summary.csv": Summary,
    "details.csv": Details,
    "loads.csv": Loads,
    "quality.csv": Quality,
    "accept.tsv": AcceptRow,
}
"""The files of a results folder that are made of its points; a point has a line in those of which it has a value."""


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some values that are columns of a row today."""
    return {name: value for name, value in values.items() if name in KINDS}


def header(kind: type) -> list[str]:
    names = [column.name for column in fields(kind)]
    return names if "point" in names else ["key", *names, "point"]


def meanings(kind: type) -> dict[str, str]:
    """What each column holds: the comment next to its field, which may go on below it."""
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        name = ""
        for field_name, comment in re.findall(r"^    (\w+):|# *(.+)$", inspect.getsource(base), re.MULTILINE):
            name = field_name or name
            if name:
                comments[name] = f"{comments.get(name, '')} {comment}".strip()
    return comments


def has_line(kind: type, row: Record | AcceptRow) -> bool:
    """Whether a point has a line in a table: always in that of all points, else where it has a value of it."""
    return kind is Summary or any(getattr(row, column.name) is not None for column in fields(kind))


def plain(row: Record) -> dict[str, Any]:
    """A row for programs: every column of summary.csv, and of the other tables those that hold something."""
    always = header(Summary)
    return {name: value for name, value in asdict(row).items() if name in always or value is not None}


def text(kind: type, rows: Iterable[Record | AcceptRow]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t" if kind is AcceptRow else ",", lineterminator="\n")
    writer.writerow(header(kind))
    writer.writerows([_cell(getattr(row, name)) for name in header(kind)] for row in rows if has_line(kind, row))
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "" if value is None else f"{value:.6g}"
    text = " ".join(str(value).split())  # a line a row
    return text.encode("utf-8", "backslashreplace").decode()  # the bytes of a file name may be no UTF-8


SHORT = {"tok_s": "tok_s_median", "machine": "device", "id": "point", "run": "run_id"}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"<=": le, ">=": ge, "<": lt, ">": gt}
_CONDITION = re.compile(r"(\w+)\s*(<=|>=|!=|=|<|>|~)\s*(.*)")


def chosen(rows: Iterable[Record], words: Sequence[str]) -> list[Record]:
    """The rows that meet all conditions (speedup>1.5, status~memory); raises ConfigError for a wrong one."""
    conditions = [*map(_condition, words)]
    return [row for row in rows if all(holds(row) for holds in conditions)]


def _condition(word: str) -> Callable[[Record], bool]:
    """COLUMN, an operator (= != < > <= >=, or ~ for a part of the text), and a value; = and != take a,b,c. An empty
    value means that nothing was measured. A row without a value meets no comparison of size."""
    match = _CONDITION.fullmatch(word.strip())
    if match is None:
        raise ConfigError(f"cannot read the condition {word!r}: write COLUMN=VALUE, such as gate=varH or speedup>1.5")
    name, sign, text = SHORT.get(match[1], match[1]), match[2], match[3].strip()
    if name not in KINDS:
        raise ConfigError(closest(name, KINDS, "column"))
    if sign == "~":
        return lambda row: text.lower() in str(getattr(row, name) or "").lower()
    if sign in ("=", "!="):
        values = [_value(name, part.strip(), word) for part in text.split(",")]
        return lambda row: (getattr(row, name) in values) == (sign == "=")
    limit = _value(name, text, word)
    return lambda row: getattr(row, name) is not None and _COMPARE[sign](getattr(row, name), limit)


def _value(name: str, text: str, word: str) -> Any:
    """A value in the type of its column; None for no text."""
    kind = KINDS[name]
    if not text:
        return None
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{word}: {name} is true or false")
        return text.lower() == "true"
    try:
        return float(text) if kind.startswith(("int", "float")) else text
    except ValueError as error:
        raise ConfigError(f"{word}: {name} is a number, not {text!r}") from error
