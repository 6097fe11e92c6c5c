"""Early exit and plain decoding of one model behind the gateway, under a rising load: is `least_time` worth its name?

    python experiments/gateway/rising_load.py --cpu --out results/published/gateway_cpu.json
    python experiments/gateway/rising_load.py --model ./qwen2.5-coder-1.5b --layer 0 --k 12 --table "2:8 8:6 24:5 48:4" \
        --draft-weights int4 --rates 4 16 48 96 160 --seconds 4 --tokens 128 --out gateway_gpu.json

    python experiments/gateway/rising_load.py --simulated early plain --out simulated.json     # servers that sleep

The servers start at once, each on a core or a GPU of its own as long as there are enough. Then the same load is asked of the
gateway under several kinds of routing, one after the other: `least_time`, `round_robin`, and each backend alone
(`fixed`). A gateway is started anew for each, so all know as little at the beginning. A load has several rates, one after the
other, requests at random moments, and ends with its last answer. In each turn the requests are others and the kinds begin
with another one.

The claim is that the p99 to the last token of `least_time` is at most that of the better backend alone. The file has
for each turn and for all of them p50 and p99 to the first token and to the last, by kind and by rate, and the requests by
backend. It is written after each load; the logs of servers and gateways lie in a folder beside it. The command fails if a
request does.

--simulated: servers that compute nothing (step_engine.py), with the step times of an H200, --slower times as long. They
slow nobody down, so all kinds of a turn are asked at once, each with servers of its own, and all meet the same machine.
Rates are shares of what the better server alone can do, and last for --requests requests on average, 6 to 30 seconds.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import overhead
import step_engine
from backends import EARLY, add_model_arguments, configs, gateway, opened, sleeping

from selfspec_cli.config import machine
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.engine.server import ServerError
from selfspec_cli.texts import library
from selfspec_cli.texts.chat import CODING

POLICIES = ("least_time", "round_robin")
ANSWER_SECONDS = 120.0
CHARACTERS = 120  # of held-out code, as a prompt
SHARES = [0.05, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
RESAMPLES = 2000
LEAST, MOST = 6.0, 30.0  # seconds of a rate that lasts for --requests


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second; with --simulated shares")
    parser.add_argument("--seconds", type=float, default=7.0, help="that each rate lasts")
    parser.add_argument("--requests", type=int, help="of each rate, on average, in place of --seconds")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--simulated", nargs="+", choices=tuple(step_engine.ARMS), help="servers that sleep")
    parser.add_argument("--slower", type=float, default=6.0, help="with --simulated: than an H200")
    parser.add_argument("--page", type=Path, help="write the page's table from this file, and measure nothing")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is None and given.page is None:
        parser.error("--out FILE is missing")
    if given.simulated:
        given.rates = [share * most(given) for share in given.rates or SHARES]
    given.rates = given.rates or [1, 2, 3, 4]
    return given


def most(given: argparse.Namespace) -> float:
    """Requests a second that the better of the servers that sleep can do alone."""
    engines = [step_engine.as_published(kind, given.slower) for kind in given.simulated]
    return max(one.slots * one.tokens / one.seconds(one.slots) for one in engines) / given.tokens


# ---- clients ---------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Of one request. Seconds; 0 for what did not come."""

    rate: float
    ttft: float = 0.0
    e2e: float = 0.0
    tokens: int = 0
    route: str = ""
    failed: str = ""


async def ask_one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], rate: float) -> Answer:
    """One stream."""
    found, began, rest = Answer(rate), time.perf_counter(), b""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        async with session.post(url + path, json=body) as stream:
            stream.raise_for_status()
            async for part in stream.content.iter_any():
                found.ttft = found.ttft or time.perf_counter() - began
                rest = (rest + part)[-4096:]
        usage = re.findall(rb'"completion_tokens": ?(\d+)', rest)
        found.tokens, found.route = int(usage[-1]), stream.headers["x-selfspec-backend"]
    except (aiohttp.ClientError, TimeoutError, LookupError) as error:
        found.failed = f"{type(error).__name__}: {error}"
    found.e2e = time.perf_counter() - began
    return found


def prompt(draw: random.Random, chat: bool) -> dict[str, Any]:
    """A coding task for a chat model; for the embedded one the beginning of held-out code at a random place."""
    if chat:
        return {"messages": [{"role": "user", "content": draw.choice(CODING)}]}
    _, text = draw.choice(library.held_out_text())
    start = draw.randrange(max(1, len(text) - CHARACTERS))
    return {"prompt": text[start : start + CHARACTERS]}


async def load(url: str, given: argparse.Namespace, turn: int) -> list[Answer]:
    """Every rate for its seconds, requests at random moments; the same ones for each kind of a turn."""
    draw, tasks, chat = random.Random(turn), [], not (given.cpu or given.simulated)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        start, at, until = time.perf_counter(), 0.0, 0.0
        for rate in given.rates:
            until += min(max(given.requests / rate, LEAST), MOST) if given.requests else given.seconds
            while at < until:
                body = {"model": "auto", "max_tokens": given.tokens, "temperature": 0, "ignore_eos": True}
                body |= {"stream": True, "stream_options": {"include_usage": True}} | prompt(draw, chat)
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                tasks.append(asyncio.ensure_future(ask_one(session, url, body, rate)))
                at += draw.expovariate(rate)
        return list(await asyncio.gather(*tasks))


# ---- what came of it -------------------------------------------------------------------------------------------------


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """A row: milliseconds to the first token and to the last, and requests by backend."""
    fine = [one for one in answers if not one.failed]
    row: dict[str, Any] = {"requests": len(answers), "completed": len(fine)}
    for name in ("ttft", "e2e"):
        values = sorted(1000 * getattr(one, name) for one in fine)
        for share in (50, 99):
            row[f"{name}_p{share}_ms"] = round(values[len(values) * share // 100], 1) if values else None
    row["by_backend"] = dict(sorted(Counter(one.route for one in fine).items()))
    if failed := [one.failed for one in answers if one.failed]:
        row["failed"] = failed[:5]
    return row


def rows(answers: Sequence[Answer]) -> dict[str, Any]:
    """All of them, and those of each rate."""
    rates = dict.fromkeys(one.rate for one in answers)
    by_rate = {f"{rate:g}": figures([one for one in answers if one.rate == rate]) for rate in rates}
    return figures(answers) | {"rates": by_rate}


def behind(kinds: dict[str, Any]) -> float | None:
    """Milliseconds by which the p99 of least_time is above that of the better backend alone; below 0: it is shorter."""
    alone = [row["e2e_p99_ms"] for kind, row in kinds.items() if kind not in POLICIES]
    ours = kinds.get(POLICIES[0], {}).get("e2e_p99_ms")
    return None if ours is None or not alone or None in alone else round(ours - min(alone), 1)


def document(answers: dict[tuple[int, str], list[Answer]]) -> dict[str, Any]:
    """Every turn, and all together."""
    turns: dict[int, dict[str, Any]] = {}
    pooled: dict[str, list[Answer]] = {}
    for (turn, kind), found in answers.items():
        turns.setdefault(turn, {})[kind] = rows(found)
        pooled.setdefault(kind, []).extend(found)
    together = {kind: rows(found) for kind, found in pooled.items()}
    said = "least_time_p99_above_the_better_alone_ms"
    return {
        "all_turns": {said: behind(together), "kinds": together},
        "turns": [{said: behind(kinds), "kinds": kinds} for kinds in turns.values()],
    }


def beside(answers: dict[tuple[int, str], list[Answer]]) -> dict[str, Any]:
    """By rate: the better backend alone, and milliseconds to the last token by which least_time is above it, with the
    95 % interval of resampled turns. Turns are drawn for both, since both were asked the same."""
    turns = sorted({turn for turn, _ in answers})
    kinds = [kind for kind in dict.fromkeys(kind for _, kind in answers) if kind not in POLICIES]
    draw, found = np.random.default_rng(0), {}
    for rate in dict.fromkeys(one.rate for many in answers.values() for one in many):
        times = {
            key: np.array([1000 * one.e2e for one in many if one.rate == rate and not one.failed])
            for key, many in answers.items()
        }

        def at(kind: str, chosen: Sequence[int], share: int) -> float:
            pooled = np.sort(np.concatenate([times[turn, kind] for turn in chosen]))  # noqa: B023
            return float(pooled[len(pooled) * share // 100])

        row: dict[str, Any] = {}
        for share in (50, 99):
            alone = {kind: at(kind, turns, share) for kind in kinds}
            better = min(kinds, key=lambda kind: alone[kind])
            more = []
            for _ in range(RESAMPLES):
                chosen = draw.choice(turns, len(turns)).tolist()
                more.append(at(POLICIES[0], chosen, share) - at(better, chosen, share))
            low, high = np.percentile(more, (2.5, 97.5))
            row[f"p{share}"] = {
                "better": better,
                "above_ms": round(at(POLICIES[0], turns, share) - alone[better], 1),
                "low": round(float(low), 1),
                "high": round(float(high), 1),
            }
        found[f"{rate:g}"] = row
    return found


def write_table(file: Path) -> None:
    """Put what servers that sleep were asked into the page, between its two markers."""
    found = json.loads(file.read_text(encoding="utf-8"))
    ours, most = found["all_turns"]["kinds"]["least_time"]["rates"], found["settings"]["rates"][-1] / SHARES[-1]
    lines = [
        "| load | `least_time` | median less the better's | p99 less the better's |",
        "|---|---|---|---|",
    ]
    for rate, row in found["beside"].items():
        cells = [f"{100 * float(rate) / most:.0f} %"]
        cells.append(f"{ours[rate]['e2e_p50_ms']:,.0f}, {ours[rate]['e2e_p99_ms']:,.0f}")
        cells += [f"{one['above_ms']:+.0f} ({one['low']:+.0f} to {one['high']:+.0f})" for one in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    overhead.into_page("simulated", lines)


Kinds = list[tuple[str, str, dict[str, Any]]]
"""Name, policy and its options."""


def kinds_of(servers: Iterable[str]) -> Kinds:
    """Everything that is compared."""
    return [*((policy, policy, {}) for policy in POLICIES), *((name, "fixed", {"backend": name}) for name in servers)]


def write(given: argparse.Namespace, head: dict[str, Any], answers: dict[tuple[int, str], list[Answer]]) -> None:
    """What is known so far."""
    text = json.dumps(head | document(answers), indent=1)
    given.out.write_text(text + "\n", encoding="utf-8")


def measure(servers: dict[str, str], given: argparse.Namespace, logs: Path, head: dict[str, Any]) -> int:
    """Every kind in every turn; how many requests failed."""
    kinds = kinds_of(servers)
    answers: dict[tuple[int, str], list[Answer]] = {}
    for turn in range(given.turns):
        first = turn % len(kinds)
        for kind, policy, options in (*kinds[first:], *kinds[:first]):
            with gateway(servers, policy, logs / f"{turn}_{kind}", options) as url:
                answers[turn, kind] = asyncio.run(load(url, given, turn))
            print(turn, kind, json.dumps(figures(answers[turn, kind])), flush=True)
            write(given, head, answers)
    return sum(bool(one.failed) for found in answers.values() for one in found)


def simulate(given: argparse.Namespace, logs: Path, head: dict[str, Any]) -> int:
    """As `measure`, by servers that sleep: the kinds of a turn all at once."""
    answers: dict[tuple[int, str], list[Answer]] = {}
    for turn in range(given.turns):
        with ExitStack() as stack:
            urls = {}
            for kind, policy, options in kinds_of(given.simulated):
                servers = stack.enter_context(sleeping(given.simulated, given.slower))
                urls[kind] = stack.enter_context(gateway(servers, policy, logs / f"{turn}_{kind}", options))

            async def at_once(urls: Mapping[str, str] = urls, turn: int = turn) -> list[list[Answer]]:
                return await asyncio.gather(*(load(url, given, turn) for url in urls.values()))

            began, used = time.monotonic(), time.process_time()
            for kind, found in zip(urls, asyncio.run(at_once()), strict=True):
                answers[turn, kind] = found
                print(turn, kind, json.dumps(figures(found)), flush=True)
            print(f"clients: {(time.process_time() - used) / (time.monotonic() - began):.2f} of a core", flush=True)
        write(given, head | {"beside": beside(answers)}, answers)
    return sum(bool(one.failed) for found in answers.values() for one in found)


def main() -> int:
    given = arguments()
    if given.page:
        write_table(given.page)
        return 0
    logs = given.out.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    said = [word for word in sys.argv[1:] if word not in ("--out", str(given.out))]
    words = {name: value for name, value in vars(given).items() if name not in ("out", "page")}
    head = {"command": " ".join(["python experiments/gateway/rising_load.py", *said]), "settings": words}
    head["versions"] = machine.versions()
    if given.simulated:
        return 1 if simulate(given, logs, head) else 0
    with tempfile.TemporaryDirectory() as folder:
        scratch, began = Path(folder), time.monotonic()
        wanted = configs(given)
        head["device"] = machine.device(wanted[EARLY])
        try:
            with opened(wanted, given.cpu, logs, scratch) as servers:
                print(f"{', '.join(servers)} answer after {time.monotonic() - began:.0f} s", flush=True)
                return 1 if measure({name: one.url for name, one in servers.items()}, given, logs, head) else 0
        except (ConfigError, ServerError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a library must not keep a GPU
