"""One replica against two behind a router: what `selfspec serve replicas=2` gains at 64 clients.

    python experiments/scale/two_replicas.py --router /path/to/vllm-router --out two_replicas.json
    python experiments/scale/two_replicas.py --cpu --router gateway --clients 4 --out two_replicas.json

The Llama-3-8B shape with random weights, drafting with its first 8 layers at an acceptance that is set; each replica
runs 32 requests at once. Both are started by one command. Then clients, each of which asks again at once, ask one
replica directly, and both through the router, for `--window` seconds at a time; a request is 32 tokens in, and out
between half and one and a half times `--tokens`. Answers of one length would all end in the same step: a replica would
then idle while its clients ask again, unless others wait in its queue. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
SETTLE = 1.0
REFERENCE = ROOT / "experiments" / "reference_model" / "model"
# Without what takes most of a start: compilation, and a warm-up of kernels.
QUICK = "{compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}, kernel_config: {enable_jit_warmup: false}}"
GPU = ["model=llama3_8b_shape", "model.max_model_len=1024", "model.hf_overrides={vocab_size: 4096}",
       f"model.tokenizer={REFERENCE}", "engine=h100", "engine.max_num_seqs=32", f"engine.extra={QUICK}", "layer=8",
       "k=3", "acceptance_length=3.0", "perplexity_tokens=0", "workload=decode"]  # fmt: skip
CPU = ["layer=3", "k=4", "engine.enforce_eager=true", "engine.max_num_seqs=4", "engine.kv_cache_gib=0.125",
       "model.max_model_len=512"]  # fmt: skip


async def asked(url: str, model: str, clients: int, window: float, tokens: int) -> float:
    """Output tokens a second of clients that ask one request after the other, of answers that end within `window`
    seconds. The window begins SETTLE seconds after the clients do, and they go on until it is over: a run that ends
    with its last answer would count the time in which only a few clients are left, the more so the faster it is."""
    made, opens = 0, time.perf_counter() + SETTLE

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal made
        lengths = random.Random(number)
        for turn in itertools.count():
            most = lengths.randint(tokens // 2, 3 * tokens // 2)
            prompt = [(7 * number + 31 * turn + place) % 997 + 3 for place in range(32)]
            body = {"model": model, "prompt": prompt, "max_tokens": most, "ignore_eos": True, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                came, now = (await answer.json())["usage"]["completion_tokens"], time.perf_counter() - opens
            if now > window:
                return
            made += came if now > 0 else 0

    limit = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))
    return made / window


async def name_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


def started(given: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[bytes], str, str]:
    """The command, once all answer, and the addresses of the first replica and of the router."""
    words = [*(CPU if given.cpu else GPU), "replicas=2", f"results_dir={given.out.parent}"]
    words += [f"router={given.router}"] if given.router else []
    options = ["--", "--port", str(given.port), *(["--distributed-executor-backend", "uni"] if given.cpu else [])]
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "selfspec_cli", "serve", *words, *options], stdout=out,
                                   stderr=out, env=os.environ | {"PYTHONUNBUFFERED": "1"})  # fmt: skip
    until = time.monotonic() + given.seconds
    while time.monotonic() < until and process.poll() is None:
        text = log.read_text(encoding="utf-8", errors="replace")
        if "replicas answer at" in text:
            first = re.search(r"replica0: answers at (http://\S+)", text)
            assert first is not None
            return process, first[1], f"http://127.0.0.1:{given.port}"
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    raise SystemExit(f"the replicas did not answer within {given.seconds:.0f} s: {log.read_text()[-2000:]}")


def measured(one: str, both: str, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each arm, alternating."""
    model, most = asyncio.run(name_of(one)), given.clients
    arms = {f"one replica, {most // 2} clients": (one, most // 2), f"one replica, {most} clients": (one, most),
            f"two replicas, {most} clients": (both, most),
            f"two replicas, {2 * most} clients": (both, 2 * most)}  # fmt: skip
    for url, clients in arms.values():  # the first requests of a load may wait for kernels that are compiled then
        asyncio.run(asked(url, model, clients, given.window / 2, given.tokens))
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(given.repeats):
        for name, (url, clients) in arms.items():
            found[name].append(round(asyncio.run(asked(url, model, clients, given.window, given.tokens)), 1))
            print(f"{name}: {found[name][-1]} tok/s", flush=True)
    half, single, two, full = (statistics.median(values) for values in found.values())
    return {"tokens_per_second": found, "two over one": round(two / single, 3),
            "two over one with half the clients": round(two / half, 3),
            "two with twice the clients over one": round(full / single, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", help="as for selfspec serve")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--window", type=float, default=10.0, help="seconds of each run in which tokens are counted")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200.0, help="to wait for the replicas")
    parser.add_argument("--port", type=int, default=8190)
    parser.add_argument("--cpu", action="store_true", help="try it on a CPU: the reference model, eager")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    process, one, both = started(given, given.out.with_suffix(".log"))
    try:
        found = measured(one, both, given)
        text = json.dumps(found | {"router": given.router or "chosen", "clients": given.clients}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
