r"""A server with early exit beside one without, over HTTP, on one GPU: every load of issue 17's table.

    python experiments/serving/load_on_gpu.py --model ./reference_widened --out load.json --minutes 9
    python experiments/serving/load_on_gpu.py --model ./reference_widened --out load.json --minutes 9   # the rest of it
    python experiments/serving/load_on_gpu.py --model reference --cpu --clients 1,2 --seconds 3 --out /tmp/load.json

Both servers are started at once and share the GPU (--gpus 2: each has one of its own, and both are asked at once). They
take turns, so that only one of them works at any time. `plain` runs without this package's plugin. A level is a warm-up
and one timed run of each side with the same prompts and arrivals. The file is written after each level, and a second
run with the same file does what is not in it; a level begins only if it fits into --minutes.

--orders N also measures closed loops of up to N clients under early exit with the order of steps that vLLM has
(read_first off, on the same server).

--control starts a second plain server, and tells how much two servers of one kind differ on the machine; --turns asks
all sides several times at each level. A difference between plain decoding and early exit that is smaller says nothing.

With --gpus 2, plain decoding runs on the first GPU and early exit on the second. --swap turns that round: two runs, one
with it and one without, show how much of a difference is one between the two cards. Each needs a file of its own.

Throughput of a closed loop is what arrives while all clients ask; of an open loop it is the tokens of all requests over
the time from the first arrival to the last token, because both sides get the same arrivals, and the one that is done
with them sooner is the faster one.

All clients of a closed loop begin at once, and where a run has few requests this start is what its p99 of TTFT shows.
So the latencies of the requests that began after a tenth of the run stand beside those of all (`settled`), and loops of
up to 8 clients last --few-seconds.

lengths  what every fixed draft length reaches at some loads, as requests may ask for it: the table of lengths is made
         of that, by the code of `selfspec tune`, and set on the live server. --table gives one instead: text or a file.
closed   closed loops.       poisson, bursts  at shares of what plain decoding completed at the most clients.
random   random tokens as prompts, sampled at a temperature of 2, the highest that vLLM takes: hardly a draft is
         accepted. (Greedily, the model soon repeats itself after random tokens, and drafts of that are accepted.)
off      no drafts because of the table, the request or the context; "off by table" and so on is one of the three.
varying  a closed loop of which most clients stop to ask every few seconds (--between), and the same under each fixed
         length of the table; needs a server with graphs for every length (--every-length, or without --table). What
         the table reaches over the best fixed length is under `over_fixed`.

A group may also be one level ("closed 128"), and say how many turns it has ("closed 128:3"; --turns is for those that
do not) and how many seconds its runs have ("closed 128@100", "closed:2@20"; --seconds and --few-seconds are for the
others).

--pin gives the processes of all servers the same cores, apart for the API server, the engine and the clients: where a
step takes few milliseconds, the cores that a process happens to run on decide how fast its server is.

--rust-frontend puts both servers behind vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND), which takes requests in with
several threads, where the API server is one Python process. vLLM has it; VLLM_RUST_FRONTEND_PATH names another
program.

--api-servers N gives each server N API servers in Python (vLLM's --api-server-count), between which its clients are
spread.

It needs locust. Where the start of each server spent its time is under `start`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.schema import EngineConfig, LoadConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.early_exit.request_settings import K
from selfspec_cli.engine import starting
from selfspec_cli.engine.server import Server, open_server
from selfspec_cli.progress import ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import latency, tables
from selfspec_cli.record.point import Point, median
from selfspec_cli.scripts import among, decimals, numbers
from selfspec_cli.stages import load, load_url, loads, measure
from selfspec_cli.stages.sweep import SweepResult

VARYING = "clients come and go"
PLAIN, DRAFTING, CONTROL, LAUNCHED = "plain", "early exit", "plain again", "launched first"
CLOSED = {1: 1.95, 8: 1.8, 32: 1.55, 64: 1.3, 128: 1.0, 256: 1.0}  # the speedup that is wanted at so many clients
ORDER = (128, 256, 1, 32, 64, 8)
LENGTHS_SECONDS = 3.0
FEW_CLIENTS = 8
SETTLED = 0.1  # of a closed loop's run: after it, requests arrive one by one and no longer all at once
HOT = 2.0  # the highest temperature that vLLM takes
GROUPS = ("lengths", "closed", "poisson", "bursts", "varying", "random", "off")
GROUP = re.compile(r"(?P<name>[^:@]+)(?::(?P<turns>\d+))?(?:@(?P<seconds>\d+(?:\.\d+)?))?")
FRONT_CORES, ENGINE_CORES = 2, 4  # with --pin: of the API servers and of the engines; the clients get the others
FIGURES = ("tok_s_median", "req_s", "requests", "failed_requests", "load_seconds", "ttft_ms", "ttft_p90_ms",
           "ttft_p99_ms", "tpot_ms", "tpot_p90_ms", "tpot_p99_ms", "itl_p99_ms", "e2e_ms", "e2e_p99_ms", "accept_rate",
           "rate", "identical", "outputs", "status")  # fmt: skip
LATENCIES = ("ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms", "ttft_ms", "tpot_ms")
OF_THE_CLIENTS = ("server_cpu", "client_cpu", "late_p99_ms", "unlike_answers", "rss_mib", "rss_growth_mib", "errors")


@dataclass(frozen=True)
class Level:
    """One load. share: of plain decoding's saturation, in place of a rate. prompts: None for those of --prompts.
    length: that each request asks for. table: of lengths, on the live server; None for the one that is deployed.
    wanted: throughput over plain decoding, 0 where there is nothing to compare with."""

    group: str
    name: str
    load: LoadConfig
    wanted: float
    share: float | None = None
    prompts: str | None = None
    length: int | None = None
    table: str | None = None
    sides: tuple[str, ...] = (PLAIN, DRAFTING)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--draft-weights", default="shared", choices=tuple(DRAFT_WEIGHTS))
    parser.add_argument("--clients", type=numbers, default=list(ORDER), help="of the closed loops, in their order")
    parser.add_argument(
        "--lengths-at", type=numbers, default="32,64,128,256", help="clients at which every length is tried"
    )
    parser.add_argument("--table", help="of lengths, or a file that holds it; without it, it is measured")
    parser.add_argument("--every-length", action="store_true", help="graphs for every length, beside those of --table")
    parser.add_argument("--groups", default=",".join(GROUPS),
                        help="of levels, or levels; in their order, with turns and seconds")  # fmt: skip
    parser.add_argument(
        "--between",
        type=numbers,
        default="32,128",
        help="numbers of clients between which the varying loop alternates",
    )
    parser.add_argument("--period", type=float, default=4.0, help="of the varying loop, seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each timed run")
    parser.add_argument("--few-seconds", type=float, default=30.0, help="of those of up to 8 clients")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole command")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU's memory, for each server")
    parser.add_argument("--adaptive", action="store_true", help="lengths also by acceptance (adaptive_length)")
    parser.add_argument(
        "--wanted",
        type=decimals,
        default=[],
        help="speedup of closed loops, or one for each of --clients; what issue 17 asks of the widened model",
    )
    parser.add_argument("--prompts", default="heldout", help="as workload.prompts: heldout, chat, coding or edits")
    parser.add_argument("--control", action="store_true", help="a second plain server beside the first")
    parser.add_argument("--orders", type=int, default=0, help="clients up to which vLLM's order of steps is asked too")
    parser.add_argument("--turns", type=int, default=1, help="of each level")
    parser.add_argument("--pin", action="store_true", help="the same cores for the processes of all servers")
    parser.add_argument("--rust-frontend", action="store_true", help="vLLM's front end in Rust, for all servers")
    parser.add_argument("--api-servers", type=int, default=1, help="in Python, of each server")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--swap", action="store_true", help="with --gpus 2: plain decoding on the second GPU")
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU: fp32, eager")
    parser.add_argument("--results", type=Path, help="a results folder for the points; none is kept without it")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    if given.swap and given.gpus == 1:
        parser.error("--swap exchanges the GPUs of the two servers, so it needs --gpus 2")
    if given.api_servers > 1 and given.rust_frontend:
        parser.error("--api-servers is for those in Python, of which --rust-frontend takes the place")
    if len(given.wanted) > 1 and len(given.wanted) != len(given.clients):
        parser.error("--wanted: one number, or one for each of --clients")
    if len(given.between) != 2:
        parser.error("--between: the lower and the higher number of clients, such as 32,128")
    try:
        given.table = table_of(given.table, given.k)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--table {given.table!r}: {error}")
    names = dict.fromkeys(name for level in levels(given) for name in (level.group.split()[0], level.group, level.name))
    known = among((*GROUPS, *(name for name in names if name not in GROUPS)), "group or level")
    for word in given.groups.split(","):
        if (group := GROUP.fullmatch(word)) is None:
            parser.error(f"--groups {word!r}: NAME, NAME:TURNS, NAME@SECONDS or NAME:TURNS@SECONDS")
        try:
            known(group["name"])
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --groups: {error}")
    return given


def table_of(word: str | None, k: int) -> str | None:
    """--table as text: it is a table, or a file that holds one, alone or in JSON."""
    if word and Path(word).is_file():
        text = Path(word).read_text(encoding="utf-8")
        word = str(json.loads(text)["table"]) if word.endswith(".json") else text.strip()
    if word:
        LengthTable.parse(word, k)
    return word


def config(given: argparse.Namespace, table: str | None) -> RunConfig:
    """The server with early exit. table: of lengths, None while they are to be measured."""
    most = max(given.clients)
    path = Path(given.model)
    model = ModelConfig(name=path.name, path=given.model, dtype="float32" if given.cpu else "bfloat16",
                        max_model_len=1024)  # fmt: skip
    engine = EngineConfig(name="h100", device="cpu" if given.cpu else "cuda", enforce_eager=given.cpu,
                          max_num_seqs=most, max_num_batched_tokens=None if given.cpu else 8192,
                          gpu_memory_utilization=given.memory_share,
                          kv_cache_gib=0.5 if given.cpu else given.kv_gib)  # fmt: skip
    longest = 32 if given.prompts == "heldout" else 1024 - given.output_len
    work = WorkloadConfig(prompts=given.prompts, input_len=longest, output_len=given.output_len, num_prompts=most)
    return RunConfig(model=model, workload=work, engine=engine, layer=given.layer, k=given.k, warmup=1,
                    draft_weights=given.draft_weights,
                    length_table=loads.every_width(given.k) if given.every_length or not table else table,
                    adaptive_length=given.adaptive,
                    load=LoadConfig(clients=most, repeats=1, seconds=given.seconds,
                                    frontend="rust" if given.rust_frontend else "python"))  # fmt: skip


def levels(given: argparse.Namespace) -> Iterator[Level]:
    """Everything that is measured, in the order in which it is."""
    clients, most, seconds = given.clients, max(given.clients), given.seconds

    def closed(number: int, seconds: float = seconds) -> LoadConfig:
        return LoadConfig(clients=number, seconds=seconds, repeats=1)

    some = [number for number in (1, 32, 128) if number in clients] or clients[:2]
    if not given.table:
        for number in given.lengths_at:
            for k in (0, *loads.lengths(given.k)):
                yield Level("lengths", f"lengths {number} k={k}", closed(number, min(LENGTHS_SECONDS, seconds)), 0.0,
                            length=k, table=loads.every_width(given.k), sides=(DRAFTING,))  # fmt: skip
    said = given.wanted * len(clients) if len(given.wanted) == 1 else given.wanted
    wanted = dict(zip(clients, said, strict=True)) if said else CLOSED
    for number in clients:
        lasting = max(seconds, given.few_seconds) if number <= FEW_CLIENTS else seconds
        yield Level("closed", f"closed {number}", closed(number, lasting), wanted.get(number, 0.98))
    for share in (0.3, 0.6, 0.9):
        yield Level("poisson", f"poisson {share:.0%}", LoadConfig(seconds=seconds, repeats=1), 0.98, share=share)
    burst = min(64, most)
    yield Level("bursts", f"bursts of {burst}", LoadConfig(seconds=seconds, repeats=1, burst=burst), 0.98, share=0.6)
    low, high = given.between
    varying = LoadConfig(clients=high, low_clients=low, period=given.period, seconds=seconds, repeats=1)
    yield Level("varying", VARYING, varying, 0.98)
    fixed = set(loads.lengths(given.k))
    if given.table:
        fixed = {cell.k for cell in LengthTable.parse(given.table, given.k).cells} - {0}
    for k in sorted(fixed):
        yield Level("varying", f"{VARYING} k={k}", varying, 0.0, table=f"1:{k}", sides=(DRAFTING,))
    for number in some:
        yield Level("random", f"random {number}", closed(number), 0.97, prompts="random")
    for number in some:
        yield Level("off by table", f"off by table {number}", closed(number), 0.99, table="1:0")
        if number == some[-1] or number == some[0]:
            yield Level("off by request", f"off by request {number}", closed(number), 0.99, length=0)
            yield Level("off by context", f"off by context {number}", closed(number), 0.99, table=f"1:{given.k} 1@8:0")


def planned(given: argparse.Namespace) -> Iterator[Level]:
    """The levels that were asked for, alternating; a turn after the first has its number after the level's name.
    Settings of a level override those of its group."""
    chosen: dict[str, tuple[Level, int]] = {}
    words = [word for text in given.groups.split(",") if (word := GROUP.fullmatch(text))]
    said = {word["name"] for word in words}
    for word in words:
        for level in levels(given):
            group = word["name"] in (level.group, level.group.split()[0])
            if word["name"] == level.name or (group and level.name not in said):
                load = replace(level.load, seconds=float(word["seconds"])) if word["seconds"] else level.load
                chosen[level.name] = (replace(level, load=load), int(word["turns"] or given.turns))
    for turn in range(1, max((turns for _, turns in chosen.values()), default=0) + 1):
        for level, turns in chosen.values():
            if turn > turns:
                continue
            sides = (*level.sides, CONTROL) if given.control and PLAIN in level.sides else level.sides
            if level.group == "closed" and (level.load.clients or 0) <= given.orders:
                sides = (*sides, LAUNCHED)
            yield replace(level, name=named(level.name, turn), sides=sides)


def named(level: str, turn: int) -> str:
    return level if turn == 1 else f"{level} ({turn})"


def by_level(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Names as `named` makes them, by level and turn."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        turn = re.search(r" \((\d+)\)$", name)
        level, number = (name[: turn.start()], int(turn[1])) if turn else (name, 1)
        found.setdefault(level, {})[number] = name
    return found


def made_table(rows: dict[str, Any], given: argparse.Namespace) -> str | None:
    """The table of what was measured; None while that is not complete."""
    found = []
    for number in sorted(given.lengths_at):
        arms = {k: rows.get(f"lengths {number} k={k}", {}).get(DRAFTING) for k in (0, *loads.lengths(given.k))}
        if any(arm is None or "tok_s" not in arm for arm in arms.values()):
            return None
        speeds = {k: loads.Speed(arm["tok_s"], arm.get("tpot_p99_ms")) for k, arm in arms.items()}
        plain = speeds.pop(0)
        k = loads.fastest(speeds, plain)
        if k is None:
            found.append(loads.Load(number, measure.PLAIN, None, []))
        else:
            best = arms[k]
            tokens = best.get("tokens_a_round")
            cost = None if tokens is None else round(max(0.0, tokens * plain.tok_s / best["tok_s"] - 1), 3)
            found.append(loads.Load(number, Setting("none", None, k), cost, []))
    made = loads.table(found, Setting("none", None, given.k))
    return str(made)


@dataclass
class Side:
    """A server, and what asks it."""

    server: Server
    loader: load.Loader
    table: str = ""


@dataclass
class Session:
    """Both servers, and what was found so far."""

    given: argparse.Namespace
    cfg: RunConfig
    sides: dict[str, Side]
    found: dict[str, Any]
    until: float
    pool: ThreadPoolExecutor
    table: str = ""  # that is deployed
    read_first: bool = True  # what the server with early exit is set to
    beyond: float = 8.0  # seconds that a level takes beside its timed runs, a side

    def run(self, level: Level) -> bool:
        """Measure a level, unless it is there or does not fit; whether it is there now."""
        rows = self.found["rows"]
        if absent := [name for name in level.sides if name not in self.sides]:
            print(f"{level.name}: left out, there is no server for {', '.join(absent)}", flush=True)
            return False
        if all("tok_s" in rows.get(level.name, {}).get(side, {}) for side in level.sides):
            return True
        turns = 1 if self.given.gpus > 1 else len(level.sides)
        expected = turns * (level.load.seconds + self.beyond)
        if time.monotonic() + expected > self.until:
            print(f"{level.name}: left out, {self.until - time.monotonic():.0f} s are left", flush=True)
            return False
        cfg = replace(self.cfg, load=self.load_of(level),
                      workload=replace(self.cfg.workload, name=level.name, prompts=level.prompts or self.given.prompts,
                                       temperature=HOT if level.prompts == "random" else 0.0))  # fmt: skip
        if level.share is not None and cfg.load.rate is None:
            return False
        began = time.monotonic()
        order = level.sides if len(rows) % 2 == 0 else level.sides[::-1]
        for name in order:
            if name == DRAFTING:
                self.prepare(level, name)
        if self.given.gpus > 1:
            points = {name: future.result() for name, future in
                      [(name, self.pool.submit(self.measure, cfg, name)) for name in order]}  # fmt: skip
        else:
            points = {name: self.measure(cfg, name) for name in order}
        rows[level.name] = {name: figures(point, cfg.load) for name, point in points.items()}
        rows[level.name]["seconds"] = round(time.monotonic() - began, 1)
        self.beyond = max(self.beyond, rows[level.name]["seconds"] / turns - level.load.seconds)
        self.say(level)
        return True

    def load_of(self, level: Level) -> LoadConfig:
        load = replace(level.load, frontend=self.cfg.load.frontend)
        if level.share is None:
            return load
        most = max(self.given.clients)
        full = self.found["rows"].get(f"closed {most}", {}).get(PLAIN, {}).get("req_s")
        if full is None:
            print(f"{level.name}: left out, the saturation is not known", flush=True)
        return replace(load, rate=full and level.share * full)

    def prepare(self, level: Level, name: str) -> None:
        """The table and the requests' own wishes of a level, on a server that drafts."""
        side, length = self.sides[name], level.length
        table = level.table or self.table
        if table != side.table:
            try:
                side.server.call("early_exit_set_length_table", table)
                side.table = table
            except OSError as error:  # then every request asks for what the table says
                print(f"the table cannot be set on the live server ({error}); requests ask for its length", flush=True)
                planned = LengthTable.parse(table, self.given.k).at(level.load.clients or 1, 32).k
                length = planned if length is None else length
        side.loader.more = {} if length is None else {"vllm_xargs": {K: length}}

    def measure(self, cfg: RunConfig, name: str) -> Point:
        side = self.sides[name]
        if name in (DRAFTING, LAUNCHED):
            cfg = replace(cfg, read_first=name == DRAFTING)
            if cfg.read_first != self.read_first:  # not before the server's first step, when there is nothing to set
                side.server.call("early_exit_set_read_first", cfg.read_first)
                self.read_first = cfg.read_first
        # A run of its own for each point: both plain servers have the same key.
        result = SweepResult(results.new_run_id())
        point = load_url.measured(cfg, side.server, side.loader, ignore, result, None, name in (PLAIN, CONTROL))
        side.server.check()
        if self.given.results is not None:
            results.save(self.given.results, point)
        return point

    def say(self, level: Level) -> None:
        row = self.found["rows"][level.name]
        for name in level.sides:
            one = row[name]
            if "tok_s" not in one:
                print(f"{level.name:18} {name:10} {one}", flush=True)
                continue
            print(f"{level.name:18} {name:10} {one['tok_s']:9.1f} tok/s  TTFT p99 {one['ttft_p99_ms']:8.1f}  TPOT p99 "
                  f"{one.get('tpot_p99_ms', 0):7.2f}  e2e p99 {one['e2e_p99_ms']:8.1f} ms  failed "
                  f"{one['failed_requests']}  clients {one['client_cpu'] or 0:.2f} of a core", flush=True)  # fmt: skip
        if (over := compared(level, self.found["rows"])) is not None:
            print(f"{level.name:18} {'':10} {over}", flush=True)


def steady(point: Point, seconds: float) -> float:
    """Of a closed loop, tokens a second that arrived between a tenth of the run and its end, when clients stop to ask
    anew; a request's tokens are spread evenly over its outputs.

    In an open loop this would favour the slower side: what the faster one has done in the first tenth is left out, and
    what the slower one carries over from it is counted."""
    start = SETTLED * seconds
    arrived = (request.tokens / len(request.events) * sum(start <= moment <= seconds for moment in request.events)
               for request in point.repeats[-1].requests)  # fmt: skip
    return sum(arrived) / (seconds - start)


def settled(point: Point, seconds: float) -> dict[str, float]:
    """Of a closed loop: how many requests began after a tenth of the run, and percentiles of their TTFT and TPOT."""
    began = [one for one in point.repeats[-1].requests if one.arrival >= SETTLED * seconds]
    found = {name: value for name, value in latency.summary(began).items() if name.startswith(("ttft", "tpot"))}
    return {"requests": len(began)} | found


def figures(point: Point, load: LoadConfig) -> dict[str, Any]:
    """What is kept of a point. tok_s_median: tokens a second from the first request to the last token. tok_s: what both
    sides are compared by, which in an open loop is the same, and in a closed one what came while it was steady."""
    requests = [request for repeat in point.repeats for request in repeat.requests]
    row = asdict(tables.row(point)) | latency.summary(requests)
    if point.repeats:
        row |= {"requests": len(requests), "load_seconds": median([repeat.seconds for repeat in point.repeats])}
    found = {name: row[name] for name in FIGURES if row.get(name) is not None}
    if point.ok and point.repeats:
        closed = load.kind == "closed"
        found["tok_s"] = steady(point, load.seconds) if closed else row["tok_s_median"]
        found |= {"settled": settled(point, load.seconds)} if closed else {}
    found |= {name: point.engine.get(name) for name in OF_THE_CLIENTS}
    if point.repeats and (counts := point.repeats[-1].verified) is not None and counts.rounds:
        found["tokens_a_round"] = 1 + counts.accepted / counts.rounds
        found["places_a_round"] = counts.places / counts.rounds
    if point.repeats and (own := point.repeats[-1].drafting):
        found["drafting"] = {name: own.get(name) for name in ("rounds", "steps", "drafted", "length_histogram")}
    if not point.ok:
        found["reason"] = point.reason
    return found


def compared(level: Level, rows: dict[str, Any]) -> dict[str, Any] | None:
    """The level as issue 17 asks for it: ratios over plain decoding, and whether they are reached."""
    row = rows.get(level.name, {})
    one, plain = row.get(DRAFTING, {}), row.get(PLAIN, {})
    if "tok_s" not in one or "tok_s" not in plain or not level.wanted:
        return None
    found: dict[str, Any] = {"throughput": round(one["tok_s"] / plain["tok_s"], 3), "wanted": level.wanted}
    found["reached"] = found["throughput"] >= level.wanted
    if "tok_s" in row.get(CONTROL, {}):
        found["control"] = round(row[CONTROL]["tok_s"] / plain["tok_s"], 3)
    if "tok_s" in (other := row.get(LAUNCHED, {})):
        found[LAUNCHED] = {name.removesuffix("_ms"): round(other[name] / plain[name], 3)
                           for name in ("tok_s", *LATENCIES) if name in other and name in plain}  # fmt: skip
    for name in LATENCIES:
        if name in one and name in plain:
            found[name.removesuffix("_ms")] = round(one[name] / plain[name], 3)
    ours, theirs = (side.get("settled", {}) for side in (one, plain))
    for name in ("ttft_p99_ms", "tpot_p99_ms"):
        if name in ours and name in theirs:
            found[f"settled_{name.removesuffix('_ms')}"] = round(ours[name] / theirs[name], 3)
    return found


def over_turns(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of levels that had several turns, medians and ranges of what `compared` says. found: by name."""
    ranges: dict[str, dict[str, Any]] = {}
    for level, names in by_level(found).items():
        turns = [found[name] for name in names.values()]
        for figure in ("throughput", "control", "ttft_p99", "tpot_p99"):
            ratios = [one[figure] for one in turns if figure in one]
            if len(ratios) > 1:
                ranges.setdefault(level, {"turns": len(turns), "wanted": turns[0]["wanted"]})[figure] = spread(ratios)
    return ranges


def over_fixed(rows: dict[str, Any]) -> dict[str, Any]:
    """What the table reached, under a load that varies, over the fixed length that reached most in the median of the
    turns; {} before both were measured."""
    measured = [name for name, row in rows.items() if name.startswith(VARYING) and "tok_s" in row.get(DRAFTING, {})]
    speeds = {level: {turn: rows[name][DRAFTING]["tok_s"] for turn, name in names.items()}
              for level, names in by_level(measured).items()}  # fmt: skip
    table = speeds.pop(VARYING, None)
    if table is None or not speeds:
        return {}
    best = max(speeds, key=lambda name: statistics.median(speeds[name].values()))
    ratios = [round(table[turn] / speed, 4) for turn, speed in speeds[best].items() if turn in table]
    medians = {name: round(statistics.median(found.values()), 1) for name, found in speeds.items()}
    return {"table": round(statistics.median(table.values()), 1), "fixed": medians, "best": best,
            "over_the_best": spread(ratios)} if ratios else {}  # fmt: skip


def spread(ratios: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(ratios), 3), "low": min(ratios), "high": max(ratios), "all": ratios}


def environment(given: argparse.Namespace, name: str, cache: Path) -> dict[str, str]:
    """Variables of a side's server."""
    # The phases of the start are read from lines of the level INFO, which the host may have turned off.
    found = {"PYTHONUNBUFFERED": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CACHE_ROOT": str(cache)}
    drafts = name == DRAFTING
    if not drafts:
        found["VLLM_PLUGINS"] = ""
    if given.gpus > 1:
        found["CUDA_VISIBLE_DEVICES"] = "0" if drafts == given.swap else "1"
    return found


def cores() -> list[int]:
    """Of this process, those of one physical core beside each other."""

    def physical(core: int) -> str:
        try:
            return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:  # not known here
            return str(core)

    own = os.sched_getaffinity(0)
    siblings: dict[str, list[int]] = {}
    for core in sorted(own):
        siblings.setdefault(physical(core), []).append(core)
    return [core for together in siblings.values() for core in together]


def pin(servers: Iterable[Server]) -> dict[str, list[int]]:
    """Give all threads of all servers their cores, and this process, which starts the clients, those that are left."""
    known = cores()
    if len(known) <= FRONT_CORES + ENGINE_CORES:
        raise SystemExit(f"--pin: {len(known)} cores; more than {FRONT_CORES + ENGINE_CORES} are needed")
    parts = {"front": known[:FRONT_CORES], "engine": known[FRONT_CORES:][:ENGINE_CORES],
             "clients": known[FRONT_CORES + ENGINE_CORES:]}  # fmt: skip
    for server in servers:
        for process, name, _ in server.processes():
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(int(thread.name), parts["engine" if "Engine" in name else "front"])
    os.sched_setaffinity(0, parts["clients"])
    return parts


@contextmanager
def both(
    given: argparse.Namespace, cfg: RunConfig, found: dict[str, Any], pool: ThreadPoolExecutor
) -> Iterator[dict[str, Side]]:
    """Both servers, and the control, started at once. Their threads live as long as `pool`: a process ends with the
    thread that started it."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = {PLAIN: replace(cfg, method=Method.baseline, layer=None, k=None, draft_weights="shared",
                                 length_table=None, adaptive_length=False),
                  DRAFTING: cfg}  # fmt: skip
        if given.control:
            wanted[CONTROL] = wanted[PLAIN]
        began = time.monotonic()

        def begin(name: str) -> tuple[Future[Server], Future[list[tuple[float, str]]]]:
            place = scratch / name.replace(" ", "_")
            place.mkdir()
            log = given.out.with_suffix(f".{place.name}.log")
            log.unlink(missing_ok=True)
            # Several compile at once, so each has a cache of its own.
            cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / place.name
            more = ("--api-server-count", str(given.api_servers)) if given.api_servers > 1 else ()
            server = open_server(wanted[name], more, log, place, environment(given, name, cache))
            opening = pool.submit(stack.enter_context, server)
            return opening, pool.submit(starting.follow, log, opening.done)

        opened = {name: begin(name) for name in wanted}
        sides = {}
        for name, (opening, following) in opened.items():
            server, lines = opening.result(), following.result()
            found.setdefault("start", {}).setdefault(name, []).append(
                {"seconds": round(lines[-1][0], 1) if lines else None,
                 "phases": {key: round(value, 2) for key, value in starting.phases(lines).items()}})  # fmt: skip
            side = load.Loader(scratch / "raw" / name)
            sides[name] = Side(server, side, str(wanted[name].length_table))
            print(f"{name}: answers {time.monotonic() - began:.0f} s after the first began to start", flush=True)
        if given.orders:
            sides[LAUNCHED] = sides[DRAFTING]
        if given.pin:
            found["cores"] = pin(side.server for side in sides.values())
        print(f"the servers answer after {time.monotonic() - began:.0f} s", flush=True)
        for name, started in found["start"].items():
            print(f"{name}: {json.dumps(started[-1])}", flush=True)
        yield sides


def main() -> None:
    given = arguments()
    until = time.monotonic() + 60 * given.minutes - 12  # what is left is for ending the servers
    missing = [name for name in ("locust", "gevent") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not installed; pip install 'selfspec[load]'")
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {"rows": {}}
    table = given.table or found.get("table") or made_table(found["rows"], given)
    if table:
        given.table, found["table"] = table, table
    cfg = config(given, table)
    chosen = list(planned(given))

    def save() -> None:
        known = {one.name: one for one in [*levels(given), *chosen]}
        found["compared"] = {name: over for name, level in known.items()
                             if (over := compared(level, found["rows"])) is not None}  # fmt: skip
        found["over_turns"] = over_turns(found["compared"])
        found["over_fixed"] = over_fixed(found["rows"])
        given.out.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")

    given.out.parent.mkdir(parents=True, exist_ok=True)
    found |= {"device": machine.device(cfg), "versions": machine.versions(), "arguments": {
        name: str(value) for name, value in vars(given).items()}}  # fmt: skip
    with ThreadPoolExecutor(8) as pool, both(given, cfg, found, pool) as sides:
        save()
        sides[PLAIN].loader.prompts(cfg)  # what it imports, two threads at once cannot import for the first time
        session = Session(given, cfg, sides, found, until, pool)
        for level in chosen:
            if level.group != "lengths" and not session.table:
                made = table or made_table(found["rows"], given)
                session.table = made or str(LengthTable.fixed(given.k))
                found |= {"table": made} if made else {}
                print(f"table: {session.table}" + ("" if made else " (the lengths were not measured)"), flush=True)
            session.run(level)
            save()
    print(json.dumps(found["over_turns"] or found["compared"], indent=1))
    print(json.dumps(found["over_fixed"], indent=1))


if __name__ == "__main__":
    sys.exit(main())
