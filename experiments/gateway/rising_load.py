"""Early exit and plain decoding of one model behind the gateway, under a rising load: is `least_time` worth its name?

    python experiments/gateway/rising_load.py --cpu --out results/published/gateway_cpu.json
    python experiments/gateway/rising_load.py --model ./qwen2.5-coder-1.5b --layer 0 --k 12 --table "2:8 8:6 24:5 48:4" \
        --draft-weights int4 --rates 4 16 48 96 --seconds 4 --tokens 128 --out gateway_gpu.json

The servers start at once, each on a core or a GPU of its own as long as there are enough. Then the same load is asked of the
gateway under several kinds of routing, one after the other: `least_time`, `round_robin`, and each backend alone
(`fixed`). A gateway is started anew for each, so all know as little at the beginning. A load has several rates, one after the
other, requests at random moments, and ends with its last answer. In each turn the requests are others and the kinds begin
with another one.

The claim is that the p99 to the last token of `least_time` is at most that of the better backend alone. The file has
for each turn and for all of them p50 and p99 to the first token and to the last, by kind and by rate, and the requests by
backend. It is written after each load; the logs of servers and gateways lie in a folder beside it. The command fails if a
request does. Servers need orjson beside vLLM's own packages, and no other part of the extra `gateway`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from selfspec_cli.config import machine
from selfspec_cli.config.schema import ConfigError, EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.server import Server, ServerError, ask, free_port, open_server
from selfspec_cli.stages.launch.devices import gpu_numbers
from selfspec_cli.texts import library
from selfspec_cli.texts.chat import CODING

EARLY, PLAIN = "early", "plain"
READY_SECONDS, STOP_SECONDS = 60.0, 20.0
GATEWAY = """
import sys
from selfspec_cli.gateway import files, server
load = lambda: files.load(sys.argv[1])
server.serve(load(), lambda line: print(line, flush=True), load)
"""  # what `selfspec gateway FILE` does, without the packages of the command line
POLICIES = ("least_time", "round_robin")
ANSWER_SECONDS = 120.0
CHARACTERS = 120  # of held-out code, as a prompt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a folder, or `reference`, the embedded model")
    parser.add_argument("--cpu", action="store_true", help="serve on this machine's CPU, in fp32, one core a server")
    parser.add_argument("--layer", type=int, default=3, help="exit layer; 0: all layers draft")
    parser.add_argument("--k", type=int, default=4, help="draft length, the longest one where there is a table")
    parser.add_argument("--table", help="of draft lengths by requests, such as `2:8 8:6`")
    parser.add_argument("--draft-weights", default="shared")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 3, 4], help="requests a second")
    parser.add_argument("--seconds", type=float, default=7.0, help="that each rate lasts")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


# ---- servers and the gateway -----------------------------------------------------------------------------------------


def configs(given: argparse.Namespace) -> dict[str, RunConfig]:
    """What each server serves, by its name."""
    name, cpu = Path(given.model).name, given.cpu
    model = ModelConfig(name=name, path=given.model, dtype="float32" if cpu else "bfloat16", max_model_len=1024)
    engine = EngineConfig(
        device="cpu" if cpu else "cuda",
        enforce_eager=cpu,
        max_num_seqs=64,
        max_num_batched_tokens=None if cpu else 4096,
        gpu_memory_utilization=None if cpu else 0.3,
        kv_cache_gib=0.25 if cpu else 8.0,
        enable_prefix_caching=True,
    )
    work = WorkloadConfig(input_len=128, output_len=given.tokens, num_prompts=64)
    early = RunConfig(
        model=model,
        workload=work,
        engine=engine,
        layer=given.layer or None,
        k=given.k,
        draft_weights=given.draft_weights,
        length_table=given.table,
        warmup=1,
    )
    plain = replace(early, method=Method.baseline, layer=None, k=None, draft_weights="shared", length_table=None)
    return {EARLY: early, PLAIN: plain}


def place(number: int, cpu: bool) -> dict[str, str]:
    """Where a server runs: a core or a GPU of its own, as long as there are enough of them."""
    if cpu:
        cores = sorted(os.sched_getaffinity(0))
        return {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
    mine = gpu_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), max(1, len(machine.gpus())))
    return {"CUDA_VISIBLE_DEVICES": mine[number % len(mine)]}


@contextmanager
def opened(wanted: Mapping[str, RunConfig], cpu: bool, logs: Path, scratch: Path) -> Iterator[dict[str, Server]]:
    """All servers, started at once. Their threads live as long as the block: a process ends with its thread.

    Raises:
        ServerError: one of them did not start.
    """
    with ThreadPoolExecutor(len(wanted)) as pool, ExitStack() as stack:
        opening = {}
        for number, (name, cfg) in enumerate(wanted.items()):
            (scratch / name).mkdir()
            log = logs / f"{name}.log"
            log.unlink(missing_ok=True)
            cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / name
            own = place(number, cpu) | {"VLLM_CACHE_ROOT": str(cache)}
            opening[name] = pool.submit(stack.enter_context, open_server(cfg, (), log, scratch / name, own))
        yield {name: one.result() for name, one in opening.items()}


@contextmanager
def gateway(
    servers: Mapping[str, Server],
    policy: str,
    folder: Path,
    options: Mapping[str, Any],
) -> Iterator[str]:
    """The address of a gateway in front of these servers, once all of them take requests. folder: of its logs."""
    port = free_port()
    settings = {
        "port": port,
        "policy": policy,
        "policy_options": {policy: dict(options)},
        "ledger": {"plain_share": 0.0},
        "results_dir": str(folder.absolute()),
        "backends": [{"name": name, "kind": "local", "url": one.url} for name, one in servers.items()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "gateway.yaml"
    config.write_text(json.dumps(settings))
    words = [sys.executable, "-c", GATEWAY, str(config.absolute())]
    with open(folder / "gateway.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
    try:
        while not _all_up(url, len(servers)):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the gateway did not start: {log.name}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()


def _all_up(url: str, count: int) -> bool:
    with suppress(OSError, ValueError):
        return len(json.loads(ask(f"{url}/health", seconds=2.0))["backends"]) == count
    return False


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
    draw, tasks = random.Random(turn), []
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        start, at = time.perf_counter(), 0.0
        for number, rate in enumerate(given.rates):
            while at < (number + 1) * given.seconds:
                body = {"model": "auto", "max_tokens": given.tokens, "temperature": 0, "ignore_eos": True}
                body |= {"stream": True, "stream_options": {"include_usage": True}} | prompt(draw, not given.cpu)
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


def measure(servers: dict[str, Server], given: argparse.Namespace, logs: Path, head: dict[str, Any]) -> int:
    """Every kind in every turn; how many requests failed."""
    kinds: list[tuple[str, dict[str, Any]]] = [(policy, {}) for policy in POLICIES]
    kinds += [("fixed", {"backend": name}) for name in servers]
    answers: dict[tuple[int, str], list[Answer]] = {}
    for turn in range(given.turns):
        first = turn % len(kinds)
        for policy, options in (*kinds[first:], *kinds[:first]):
            kind = options.get("backend", policy)
            with gateway(servers, policy, logs / f"{turn}_{kind}", options) as url:
                answers[turn, kind] = asyncio.run(load(url, given, turn))
            print(turn, kind, json.dumps(figures(answers[turn, kind])), flush=True)
            given.out.write_text(json.dumps(head | document(answers), indent=1) + "\n", encoding="utf-8")
    return sum(bool(one.failed) for found in answers.values() for one in found)


def main() -> int:
    given = arguments()
    logs = given.out.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    said = [word for word in sys.argv[1:] if word not in ("--out", str(given.out))]
    words = {name: value for name, value in vars(given).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder:
        scratch, began = Path(folder), time.monotonic()
        wanted = configs(given)
        head = {
            "command": " ".join(["python experiments/gateway/rising_load.py", *said]),
            "settings": words,
            "device": machine.device(wanted[EARLY]),
            "versions": machine.versions(),
        }
        try:
            with opened(wanted, given.cpu, logs, scratch) as servers:
                print(f"{', '.join(servers)} answer after {time.monotonic() - began:.0f} s", flush=True)
                return 1 if measure(servers, given, logs, head) else 0
        except (ConfigError, ServerError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a library must not keep a GPU
