"""Draft length and threshold by load: each length timed at each number of running requests, and the table made of it.

One live engine, whose graphs exist for every length that is tried; at each load the arms take turns, plain decoding
among them, because what a draft costs beside a plain step is what a table is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit.acceptance import Ladder
from selfspec_cli.early_exit.length_table import LARGEST, Cell, LengthTable
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.early_exit.thresholds import loosest
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import latency
from selfspec_cli.stages import measure
from selfspec_cli.stages.exits import OpenEngine
from selfspec_cli.stages.measure import Arm
from selfspec_cli.texts.prompts import workload_prompts

REPEATS = 2
GAIN = 1.01
"""Drafts that are faster by less than this are left out: between loads that were measured they may cost."""
ALIKE = 0.98
"""Of the fastest one's speed: above it, lengths count as about as fast."""


Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Speed:
    """tok_s: of all requests together. tpot_p99_ms: of the slowest per cent of them; None where it was not measured."""

    tok_s: float
    tpot_p99_ms: float | None = None


@dataclass(frozen=True)
class Load:
    """What was measured at one number of running requests. best: PLAIN where drafts do not pay. cost: of a round of the
    best beyond a plain step, in plain steps; None without drafts. rows: every arm, as JSON."""

    requests: int
    best: Setting
    cost: float | None
    rows: list[dict[str, Any]]


def lengths(k: int) -> tuple[int, ...]:
    """Draft lengths that are tried in an engine that drafts at most `k` tokens."""
    return Ladder.of(k, 0.0).lengths


def every_width(k: int) -> str:
    """A table under which an engine drafts k tokens at any load, and has graphs for every length that is tried."""
    shorter = [length for length in lengths(k) if length < k]
    return " ".join([f"1:{k}", *(f"{LARGEST - place}:{length}" for place, length in enumerate(shorter))])


def settings(chosen: Setting) -> list[Setting]:
    """What is tried at each load: every length, behind the gate that was chosen and where it stays open.

    A request that closes drafts no more, while a batch drafts on as long as any of its requests does, so a gate that
    gains at one request may only cost at several.
    """
    found = list(dict.fromkeys([chosen.threshold, loosest(chosen.gate)]))
    # Behind the first draft no gate is asked.
    return [Setting(chosen.gate, limit, k) for k in lengths(chosen.k) for limit in (found if k > 1 else found[:1])]


def run(
    cfg: RunConfig,
    loads: Sequence[int],
    open_engine: OpenEngine,
    go_on: Callable[[], bool] = lambda: True,
    progress: Progress = ignore,
) -> tuple[RunConfig, list[Load]]:
    """`cfg` (a gate, its threshold and a draft length) with a table of lengths, and what was measured for it, on an
    engine with room for the greatest load. go_on: as `survey` takes it."""
    chosen = Setting(cfg.gate.kind, cfg.threshold, int(cfg.k or 0))
    room = replace(cfg.engine, max_num_seqs=max(cfg.engine.max_num_seqs, *loads))
    with open_engine(replace(cfg, engine=room, length_table=every_width(chosen.k))) as engine:
        found = survey(engine, cfg, loads, settings(chosen), repeats=REPEATS, go_on=go_on, progress=progress)
    return replace(cfg, length_table=str(table(found, chosen))), found


def fastest(tried: Mapping[Name, Speed], plain: Speed) -> Name | None:
    """The fastest of what was tried at one load, None if plain decoding is as fast.

    With many requests the device is busy with verifying, and a long draft makes the round longer for those whose drafts
    are hardly accepted, too. So of what is about as fast, what makes the slowest requests slower than plain decoding's
    (p99 TPOT) is left out where something else is there.
    """
    best = max((one.tok_s for one in tried.values()), default=0.0)
    if best < GAIN * plain.tok_s:
        return None
    alike = {name: one for name, one in tried.items() if one.tok_s >= max(ALIKE * best, GAIN * plain.tok_s)}
    limit = plain.tpot_p99_ms
    harmless = {name: one for name, one in alike.items()
                if limit is None or one.tpot_p99_ms is None or one.tpot_p99_ms <= limit}  # fmt: skip
    chosen = harmless or alike
    return max(chosen, key=lambda name: chosen[name].tok_s)


def doubts(asked: Iterable[int], found: Iterable[Load]) -> list[str]:
    """What of the loads was left out for want of time, for people."""
    left = sorted(set(asked) - {load.requests for load in found})
    late = f"no time was left for {', '.join(map(str, left))} running requests"
    return [f"{late}: the table of lengths goes on there as before; give more --minutes"] if left else []


def survey(
    engine: Engine,
    cfg: RunConfig,
    loads: Iterable[int],
    tried: Sequence[Setting],
    *,
    repeats: int,
    go_on: Callable[[], bool] = lambda: True,
    progress: Progress = ignore,
) -> list[Load]:
    """Measure every setting at each load, in rising order, as long as `go_on` says so (the first load in any case).

    engine: with graphs for every length (`every_width`) and room for as many requests.
    """
    found: list[Load] = []
    wanted = sorted(set(loads))
    for number, requests in enumerate(wanted):
        if found and not go_on():
            break
        at = replace(cfg, workload=replace(cfg.workload, batch=requests, num_prompts=requests))
        plain, *arms = measure.run(engine, at, workload_prompts(at, engine), [measure.PLAIN, *tried], repeats=repeats)
        found.append(_judged(requests, plain, arms))
        progress("loads", number + 1, len(wanted))
    progress.ended("loads", len(found), len(wanted))
    return found


def table(found: Sequence[Load], chosen: Setting) -> LengthTable:
    """The table that drafts at each load as was best there; between two loads, as at the nearer by their ratio."""
    cells: list[Cell] = []
    before = None
    for load in found:
        start = 1 if before is None else math.ceil(math.sqrt(before * load.requests))
        drafts = load.best.k > 0 and load.best.threshold != chosen.threshold
        cells.append(Cell(start, 0, load.best.k, load.best.threshold if drafts else None, load.cost))
        before = load.requests
    return LengthTable(tuple(cells))


def _judged(requests: int, plain: Arm, arms: Sequence[Arm]) -> Load:
    speeds = [_speed(arm) for arm in (plain, *arms)]
    rows = [{"requests": requests, **arm.to_dict(plain), "tpot_p99_ms": speed.tpot_p99_ms}
            for arm, speed in zip((plain, *arms), speeds, strict=True)]  # fmt: skip
    number = fastest(dict(enumerate(speeds[1:])), speeds[0])
    if number is None:
        return Load(requests, measure.PLAIN, None, rows)
    best = arms[number]
    return Load(requests, best.setting, round(_cost(best, plain), 4), rows)


def _speed(arm: Arm) -> Speed:
    times = latency.summary(one for repeat in arm.repeats for part in repeat for one in part.requests)
    return Speed(arm.median, times.get("tpot_p99_ms"))


def _cost(arm: Arm, plain: Arm) -> float:
    """What a round takes beyond a plain step, in plain steps: a round yields more tokens, in the time they took."""
    rounds = [part.verified.rounds for repeat in arm.repeats for part in repeat if part.verified is not None]
    tokens = sum(len(output) for repeat in arm.repeats for part in repeat for output in part.outputs)
    return max(0.0, tokens / sum(rounds) * plain.median / arm.median - 1)
