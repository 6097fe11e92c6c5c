"""Real vLLM servers of one model behind a gateway that is a process of its own, for the scripts of this folder.

It needs orjson beside vLLM's own packages, and no other part of the extra `gateway` that vLLM does not bring.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.machine import gpus
from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.server import Server, ask, free_port, open_server
from selfspec_cli.stages.launch.devices import gpu_numbers

EARLY, PLAIN = "early", "plain"
READY_SECONDS, STOP_SECONDS = 60.0, 20.0
GATEWAY = """
import sys
from selfspec_cli.gateway import files, server
load = lambda: files.load(sys.argv[1])
server.serve(load(), lambda line: print(line, flush=True), load)
"""  # what `selfspec gateway FILE` does, without the packages of the command line


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served. Without --layer all layers draft."""
    parser.add_argument("--model", default="reference", help="a folder, or `reference`, the embedded model")
    parser.add_argument("--cpu", action="store_true", help="serve on this machine's CPU, in fp32, one core a server")
    parser.add_argument("--layer", type=int, default=3, help="exit layer; 0: all layers draft")
    parser.add_argument("--k", type=int, default=4, help="draft length, the longest one where there is a table")
    parser.add_argument("--table", help="of draft lengths by requests, such as `2:8 8:6`")
    parser.add_argument("--draft-weights", default="shared")


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
    mine = gpu_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), max(1, len(gpus())))
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
    servers: Mapping[str, str],
    policy: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The address of a gateway, once all of its backends take requests. servers: addresses by name. folder: of logs."""
    port = free_port()
    settings = {
        "port": port,
        "policy": policy,
        "policy_options": {policy: dict(options or {})},
        "ledger": {"plain_share": 0.0},
        "results_dir": str(folder.absolute()),
        "backends": [{"name": name, "kind": "local", "url": url} for name, url in servers.items()],
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


@contextmanager
def sleeping(kinds: Sequence[str], slower: float) -> Iterator[dict[str, str]]:
    """Addresses of servers that compute nothing (`step_engine.py`), by kind, each as if it had a host of its own."""
    script = str(Path(__file__).with_name("step_engine.py"))
    found, processes = {}, []
    try:
        for number, kind in enumerate(kinds):
            host, port = f"127.0.0.{number + 1}", free_port()
            words = ["--host", host, "--port", str(port), "--slower", str(slower)]
            processes.append(subprocess.Popen([sys.executable, script, kind, *words]))
            found[kind] = f"http://{host}:{port}"
        yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()
