"""Results on disk: one row an arm in summary.csv, one in accept.tsv, appended so that nothing is ever lost.

`Record` IS the header of summary.csv and `AcceptRow` that of accept.tsv. A value that was not measured is an empty
cell (`None`), never 0. Several processes may append at once; a line cut short by a crash spoils only itself. A file of
an earlier version, which lacks columns that may be empty, is read as it is, and gets today's columns before a run.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from selfspec_cli.config.keys import KEY_LENGTH, run_key
from selfspec_cli.config.schema import (
    EARLY_EXIT,
    SPECULATIVE,
    ConfigError,
    Method,
    RunConfig,
    Runner,
    gate_threshold,
    head_spec,
)

SUMMARY = "summary.csv"
ACCEPT = "accept.tsv"
OK = "ok"


@dataclass
class Record:
    """One arm, measured. Times are wall time; tok/s counts generated tokens only."""

    run_id: str  # the command that measured it; speedups compare rows of one run_id
    time: str  # ISO 8601, with the offset from UTC
    arm: str  # baseline, layer_skip, skip; vLLM's own draft_model, ngram
    model: str
    E: int | None = None  # exit layer
    k: int | None = None  # draft tokens a round, at most
    head: str | None = None
    vocab: str | None = None  # draft vocabulary
    draft_weights: str | None = None  # shared: the target's own; fp8: 8-bit copies
    verification: str | None = None  # full: all k places of a request; adaptive: as many as pay
    gate: str | None = None
    threshold: float | None = None  # of the gate: probability (maxp) or nats squared (varH)
    runner: str | None = None  # vLLM's model runner, where one was asked for
    acceptance_length: float | None = None  # synthetic; empty: real acceptance
    workload: str | None = None
    batch: int | None = None  # requests in flight
    input_len: int | None = None  # tokens
    output_len: int | None = None  # tokens
    temperature: float | None = None
    seed: int | None = None
    repeats: int | None = None
    tok_s_median: float | None = None  # generated tokens a second, all requests together
    tok_s_min: float | None = None
    tok_s_max: float | None = None
    speedup: float | None = None  # tok_s_median over the baseline's of the same model, workload and run
    predicted: float | None = None  # speedup by the cost model, from bytes read and the accepted length measured
    efficiency: float | None = None  # speedup / predicted
    accept_rate: float | None = None  # accepted draft tokens / drafted
    mean_accepted_len: float | None = None  # tokens a verify step yields: 1 + accepted/rounds
    drafted_per_round: float | None = None
    ttft_ms: float | None = None  # time to first token, median
    itl_ms: float | None = None  # time between tokens after the first, median
    ppl: float | None = None  # of the arm's own predictive distribution on held-out text
    delta_ppl: float | None = None  # ppl minus the baseline's
    identical: int | None = None  # outputs equal to the baseline's, token for token
    outputs: int | None = None  # outputs compared
    peak_mem_mib: float | None = (
        None  # while this arm was measured: tensors on a GPU, else this process's resident memory
    )
    weights_mib: float | None = None
    kv_blocks: int | None = None  # of the KV cache
    sm_util: float | None = None  # share of the time that SMs were busy, 0 to 1 (NVML, mean over the repeats)
    dram_util: float | None = None  # share of the memory bandwidth (NVML)
    power_w: float | None = None  # mean board power (NVML)
    device: str | None = None
    status: str = OK  # "ok", or "failed: reason"
    key: str = ""  # config.run_key; last, and of fixed length, so that a torn line is seen


@dataclass
class AcceptRow:
    """vLLM's own speculative-decoding counters for one arm, summed over the timed repeats.

    It belongs to the summary row of the same run_id and key, and is written before it: a run interrupted in between
    leaves one that belongs to none, and the point is measured again.
    """

    run_id: str
    arm: str
    model: str
    E: int | None = None
    k: int | None = None
    head: str | None = None
    gate: str | None = None
    threshold: float | None = None
    batch: int | None = None
    rounds: int | None = None  # verify steps that had drafts
    drafted: int | None = None  # tokens
    accepted: int | None = None  # tokens
    accepted_at: str | None = None  # tokens accepted at position 1..k, separated by spaces
    key: str = ""


@dataclass
class Baseline:
    """What a candidate is compared with: the baseline's row, and its output token ids, one list a request."""

    record: Record
    outputs: list[list[int]]


@dataclass
class BenchResult:
    """One arm, measured: its row, its output token ids, and its drafting counters (None where nothing drafts)."""

    record: Record
    outputs: list[list[int]]
    accept: AcceptRow | None = None
    drafting: dict[str, Any] | None = None  # `early_exit.counters.summary`; None where no draft loop counted


Row = TypeVar("Row", Record, AcceptRow)


def new_run_id() -> str:
    """Names one run of one command; sorts by time."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def now() -> str:
    """The time of a row: ISO 8601 to the second, with the offset from UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def identity(cfg: RunConfig, run_id: str, layer: int | None = None, device: str | None = None) -> Record:
    """A row that says what `cfg` measures, with no measurement in it yet.

    Args:
        layer: the exit layer that the engine chose, where `cfg.layer` is None.
    """
    record = Record(run_id=run_id, time=now(), arm=cfg.method.value, model=cfg.model.name, key=run_key(cfg))
    record.device = device
    work = cfg.workload
    record.workload, record.batch = work.name, work.batch
    record.input_len, record.output_len, record.temperature = work.input_len, work.output_len, work.temperature
    record.seed, record.repeats = cfg.seed, cfg.repeats
    if cfg.method in (*EARLY_EXIT, Method.draft_model):
        record.E = cfg.layer if cfg.layer is not None else layer
    if cfg.method in EARLY_EXIT:
        record.head, record.vocab = head_spec(cfg.head, cfg.layer).name, cfg.vocab
    if cfg.method in SPECULATIVE:
        record.k, record.acceptance_length = cfg.k, cfg.acceptance_length
        record.runner = cfg.runner.value if cfg.runner is not Runner.auto else None
    if cfg.method is Method.layer_skip:
        record.draft_weights, record.verification = cfg.draft_weights, cfg.verification
        record.gate, record.threshold = cfg.gate.kind, gate_threshold(cfg)
    return record


def accept_identity(record: Record) -> AcceptRow:
    """An accept.tsv row for the arm of `record`, without counters yet."""
    return AcceptRow(**{name: getattr(record, name) for name in header(AcceptRow) if hasattr(record, name)})


def failed(record: Record, error: BaseException, prefix: str = "") -> Record:
    """`record` marked as failed, the reason on one line."""
    reason = prefix + (" ".join(str(error).split()) or type(error).__name__)
    record.status = f"failed: {reason[:300]}"
    return record


def header(kind: type) -> list[str]:
    """The column names, in order."""
    return [column.name for column in fields(kind)]


def append(path: str | os.PathLike[str], row: Record | AcceptRow) -> None:
    """Append one whole line under a file lock and wait until it is on disk; writes the header of a new file.

    Raises:
        ConfigError: the file has another header; it is left as it is.
        OSError: the line could not be written (a full disk); no part of it is in the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as handle:
        start = _check_header(path, type(row))
        if start == _format(header(type(row)), path):
            os.ftruncate(handle, 0)  # empty, or a header cut short by a crash
        end = os.fstat(handle).st_size
        rest = (start + _line(row, path)).encode()
        try:
            while rest:  # a write may take less than it was given
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, end)
            raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending and under its lock; made where there is none."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                yield handle
                return
        finally:
            os.close(handle)  # drops the lock; where another file took this one's place meanwhile, that one is locked


def prepare(results_dir: str | os.PathLike[str]) -> None:
    """Make certain, before anything is measured, that `append` will take its rows: what an earlier version wrote gets
    the columns of this one.

    Raises:
        ConfigError: a file has another header; nothing is changed.
    """
    files = [(Path(results_dir) / name, kind) for name, kind in ((SUMMARY, Record), (ACCEPT, AcceptRow))]
    older = [(path, kind) for path, kind in files if path.exists() and not _begins(path, _format(header(kind), path))]
    for path, kind in older:  # all of them, before the first is changed
        _columns(_lines(path), path, kind)
    for path, kind in older:
        _upgrade(path, kind)


def _begins(path: Path, text: str) -> bool:
    return path.read_bytes().startswith(text.encode())


def _upgrade(path: Path, kind: type) -> None:
    """Put a file with this version's columns in the place of an earlier version's, at once or not at all. Cells stay as
    they are, new ones are empty, and a line cut short stays one."""
    path = path.resolve()  # a link stays a link
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with _locked(path):
        lines = _lines(path, errors="surrogateescape")  # bytes that are no text stay as they are
        names = _columns(lines, path, kind)
        upgraded = [_upgraded(line, names, path, kind) for line in lines[1:] if f"{line}\n" != _format(names, path)]
        try:
            with part.open("w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines([_format(header(kind), path), *upgraded])
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _upgraded(line: str, names: list[str], path: Path, kind: type) -> str:
    cells = next(csv.reader([line], delimiter=_delimiter(path)), [])
    if len(cells) != len(names):
        return f"{line}\n"
    known = dict(zip(names, cells, strict=True))
    return _format([known.get(name, "") for name in header(kind)], path)


def _check_header(path: Path, kind: type) -> str:
    """What must be written before the next line: the header, the end of a torn line, or nothing."""
    expected = _format(header(kind), path)
    text = path.read_bytes() if path.exists() else b""
    if not text:
        return expected
    first, newline, _ = text.partition(b"\n")
    found = first.decode("utf-8", "replace").rstrip("\r")
    if not newline and found + "\n" != expected and expected.startswith(found):
        return expected
    if found + "\n" != expected:
        raise ConfigError(_header_message(path, found, kind))
    return "" if text.endswith(b"\n") else "\n"


def _header_message(path: Path, found: str, kind: type) -> str:
    old, new = set(next(csv.reader([found], delimiter=_delimiter(path)))), set(header(kind))
    parts = [f"{path} has another header than this version of selfspec writes."]
    parts += [f"  missing columns: {', '.join(sorted(new - old))}"] if new - old else []
    parts += [f"  unknown columns: {', '.join(sorted(old - new))}"] if old - new else []
    parts += ["  the columns are in another order"] if old == new else []
    return "\n".join([*parts, "Nothing was written. Move that file away, or choose another folder: results_dir=NAME"])


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _line(row: Record | AcceptRow, path: Path) -> str:
    return _format([_cell(getattr(row, name)) for name in header(type(row))], path)


def _format(cells: list[str], path: Path) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=_delimiter(path), lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())  # a newline inside a cell would break whole-line appends


def read(path: str | os.PathLike[str], kind: type[Row]) -> tuple[list[Row], list[str]]:
    """All rows of a file that are whole, and a warning for each line that is not.

    A file of an earlier version is read with the columns that it lacks empty.

    Raises:
        ConfigError: the file has another header.
    """
    path = Path(path)
    lines = _lines(path)
    names = _columns(lines, path, kind)
    parsers, rows = _parsers(kind), list[Row]()
    warnings: list[str] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip() or line + "\n" == _format(names, path):
            continue
        try:
            rows.append(_parse(next(csv.reader([line], delimiter=_delimiter(path))), names, kind, parsers))
        except ValueError as error:
            warnings.append(f"{path}:{number}: skipped, {error}")
    return rows, warnings


def _lines(path: Path, errors: str = "replace") -> list[str]:
    return path.read_text(encoding="utf-8", errors=errors).splitlines() if path.exists() else []


def _columns(lines: list[str], path: Path, kind: type) -> list[str]:
    """What the cells of these lines of a file are: this version's columns, or an earlier one's, from which only columns
    that may be empty are missing.

    Raises:
        ConfigError: the file has any other header.
    """
    found = next(csv.reader(lines[:1], delimiter=_delimiter(path)), [])
    needed = {column.name for column in fields(kind) if column.default is not None}
    if needed <= set(found) and found == [name for name in header(kind) if name in found]:
        return found
    _check_header(path, kind)  # missing, empty or cut short, which `append` writes again; or none of ours
    return header(kind)


def _parse(cells: list[str], names: list[str], kind: type[Row], parsers: dict[str, Callable[[str], Any]]) -> Row:
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells where {len(names)} belong (a line cut short?)")
    if not re.fullmatch(rf"[0-9a-f]{{{KEY_LENGTH}}}", cells[-1]):
        raise ValueError("the run key at its end is not whole (a line cut short?)")
    return kind(**{name: parsers[name](cell) for name, cell in zip(names, cells, strict=True)})


def _parsers(kind: type) -> dict[str, Callable[[str], Any]]:
    def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda cell: None if cell == "" else parse(cell)

    parsers: dict[str, Callable[[str], Any]] = {}
    for name, hint in get_type_hints(kind).items():
        options = [option for option in get_args(hint) if option is not type(None)]
        parsers[name] = optional(options[0]) if options else hint
    return parsers


def finished(path: str | os.PathLike[str]) -> set[str]:
    """Run keys that summary.csv holds an ok row for."""
    rows, _ = read(path, Record)
    return {row.key for row in rows if row.status == OK}


@contextmanager
def sweep_lock(results_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a results folder for one command; the lock ends with the process, however it ends.

    Raises:
        ConfigError: another live process holds it; the message names its pid.
    """
    path = Path(results_dir) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(handle, 32).decode().strip() or "unknown"
            raise ConfigError(
                f"another selfspec command (pid {pid}) is writing to {results_dir}; wait for it, or choose another "
                "folder: results_dir=NAME"
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)
