"""One measured point: everything that was measured, and what it takes to believe it. Written once, never changed.

A point is a JSON file `results/runs/<id>.json`, a line a section, of which rows, tables and figures are made.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from selfspec_cli.early_exit.counters import Snapshot, VerifyCounts
from selfspec_cli.record.statistics import RequestTimes, speedup_interval

FORMAT = 1
OK, FAILED = "ok", "failed"
MICRO = 1_000_000
AS_ITSELF = "as_itself"  # fact of a baseline: how many of its outputs were the same in another batch order


@dataclass(frozen=True)
class Repeat:
    """One timed repeat: every prompt of the workload once. seconds: wall time from the first request in to the last
    token out. verified: vLLM's counters; drafting: the draft loop's own; None where there are none."""

    seconds: float
    requests: tuple[RequestTimes, ...]
    verified: VerifyCounts | None = None
    drafting: Snapshot | None = None

    @property
    def tok_s(self) -> float:
        """Generated tokens a second, all requests together."""
        return sum(request.tokens for request in self.requests) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """What an arm was compared with. baseline, key: id and run key of the baseline's point. reused: it was measured by
    an earlier command. tok_s: of its repeats; empty where they were not kept. speedup: median over median, in the
    interval low..high (None without repeats). perplexity: the baseline's. identical: outputs equal to its, token for
    token, of `outputs`; None where acceptance was set, which makes its own text."""

    baseline: str
    key: str
    reused: bool
    tok_s: tuple[float, ...]
    speedup: float | None
    low: float | None = None
    high: float | None = None
    perplexity: float | None = None
    identical: int | None = None
    outputs: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What one arm did on a live engine. outputs: a digest of each request's output tokens in the last repeat, "" for a
    prompt of a load test that was not answered. engine: facts by the names of a row's columns, and `step_bytes`.
    perplexity: None where it was not asked for. seconds: that measuring took, warm-up and perplexity included."""

    repeats: tuple[Repeat, ...]
    outputs: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    perplexity: float | None = None
    seconds: float | None = None

    @property
    def tok_s(self) -> tuple[float, ...]:
        """Generated tokens a second of every repeat."""
        return tuple(repeat.tok_s for repeat in self.repeats)


@dataclass(frozen=True)
class Point:
    """A point. Sections that do not apply are None or empty: a failed point has no measurement. id: `<key>-<run_id>`.
    number: its place in its command. seconds: that measuring took; start_seconds: that starting its engine took,
    without a process's first import of vLLM. arm: what was measured, by a row's columns. figures: of a point without
    raw values, the columns that were kept, and its drafting summary. arm_key: `Keys.arm`; None in older files. quality:
    what is known of the arm (`Book.columns`), found later and no part of the file."""

    id: str
    key: str
    run_id: str
    number: int
    time: str
    status: str
    reason: str | None
    seconds: float | None
    start_seconds: float | None
    device: str
    arm: dict[str, Any]
    command: list[str] | None = None
    config: dict[str, Any] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] | None = None
    git: dict[str, Any] | None = None
    compared_with: Comparison | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    perplexity: float | None = None
    outputs: tuple[str, ...] = ()
    figures: dict[str, Any] | None = None
    repeats: tuple[Repeat, ...] = ()
    arm_key: str | None = None
    quality: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def tok_s(self) -> tuple[float, ...]:
        """Generated tokens a second of every repeat; empty where repeats were not kept."""
        return tuple(repeat.tok_s for repeat in self.repeats)

    @property
    def revision(self) -> str:
        """The git revision that measured it, in ten digits; empty where that is not known."""
        git = self.git or {}
        return str(git.get("revision", ""))[:10] + (" with changes" if git.get("dirty") else "")


KEPT = tuple(item.name for item in fields(Point) if item.name != "quality")  # the sections of a file


def compare(ours: Measurement, baseline: Point, *, reused: bool, real_text: bool) -> Comparison:
    """Put a measurement beside its baseline. real_text: outputs can be the baseline's (acceptance was not set)."""
    theirs = baseline.tok_s
    low, high = speedup_interval(ours.tok_s, theirs) or (None, None)
    both = []
    if real_text and len(ours.outputs) == len(baseline.outputs):
        pairs = zip(ours.outputs, baseline.outputs, strict=True)
        both = [one == other for one, other in pairs if one and other]
    return Comparison(
        baseline=baseline.id,
        key=baseline.key,
        reused=reused,
        tok_s=theirs,
        speedup=median(ours.tok_s) / median(theirs),
        low=low,
        high=high,
        perplexity=baseline.perplexity,
        identical=sum(both) if both else None,
        outputs=len(both) or None,
    )


def control(point: Point) -> tuple[int, int] | None:
    """(equal, compared) outputs of a baseline asked again, in another order or by other runs; None if it was not."""
    answered, unlike = sum(map(bool, point.outputs)), point.engine.get("unlike_answers")
    same = point.engine.get(AS_ITSELF) if unlike is None else answered - unlike
    return None if same is None or not answered else (same, answered)


def output_digests(outputs: Iterable[Sequence[int]]) -> tuple[str, ...]:
    """A digest of each output's token ids: equal outputs, equal digests."""
    return tuple(hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16] for tokens in outputs)


def to_json(point: Point) -> str:
    document = {"format": FORMAT} | {name: getattr(point, name) for name in KEPT}
    document["compared_with"] = point.compared_with and asdict(point.compared_with)
    document["repeats"] = [*map(_repeat_to_plain, point.repeats)]
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in document.items()]
    text = "{" + ",\n ".join(lines) + "}\n"
    # A file name that is no UTF-8 has surrogates in Python. JSON can escape them; UTF-8 cannot hold them.
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def from_json(text: str) -> Point:
    """The inverse of `to_json`; raises ValueError where the text is no point, or of another format."""
    data = json.loads(text)
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError("it is no point")
    if data["format"] != FORMAT:
        raise ValueError(f"it has format {data['format']}; this selfspec reads format {FORMAT}")
    sections = {name: data[name] for name in KEPT if name in data}
    try:
        if (comparison := sections.get("compared_with")) is not None:
            sections["compared_with"] = Comparison(**comparison | {"tok_s": tuple(comparison["tok_s"])})
        sections["repeats"] = tuple(map(_repeat_from_plain, sections.get("repeats", ())))
        sections["outputs"] = tuple(sections.get("outputs", ()))
        return Point(**sections)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no point: {error}") from error


def _repeat_to_plain(repeat: Repeat) -> dict[str, Any]:
    """Times as whole microseconds, which is finer than what they are good for, and half as long."""

    def micro(seconds: float) -> int:
        return round(seconds * MICRO)

    requests = [
        {"arrival_us": micro(one.arrival), "tokens": one.tokens, "events_us": list(map(micro, one.events))}
        for one in repeat.requests
    ]
    verified = None if repeat.verified is None else asdict(repeat.verified)
    return {"seconds": repeat.seconds, "verified": verified, "drafting": repeat.drafting, "requests": requests}


def _repeat_from_plain(data: Mapping[str, Any]) -> Repeat:
    requests = tuple(
        RequestTimes(one["arrival_us"] / MICRO, tuple(event / MICRO for event in one["events_us"]), one["tokens"])
        for one in data["requests"]
    )
    verified = None if data["verified"] is None else VerifyCounts(**data["verified"])
    return Repeat(data["seconds"], requests, verified, data["drafting"])
