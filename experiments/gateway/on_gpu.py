"""Early exit, plain decoding and 4 bits behind the gateway, on one host with two GPUs: who is fastest under a rising load.

    python experiments/gateway/on_gpu.py --model ./qwen2.5-coder-1.5b --k 12 --table "2:8 8:6 24:5 48:4" --out gateway_gpu.json
    python experiments/gateway/on_gpu.py --model reference --cpu --minutes 9 --out /tmp/gateway_cpu.json

Three servers of one model start at once: early exit on the first GPU; plain decoding and the same weights in 4 bits (rounded
here, groups of 128, as GPTQ keeps them) on the second. Then the same rising load is asked of each alone, and of the gateway,
which is a process of its own, with `least_time` and with `round_robin`. A run has several rates, one after the other, and
ends with its last answer. Reported for each run and each of its rates: routes, p50 and p99 of the time to the first token
and to the last, and tokens a second. The file is written after each run; a run begins only if it fits into --minutes.

It needs orjson beside vLLM's own packages, and no other part of the extra `gateway` that vLLM does not bring.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.engine.server import Server, ServerError, ask, free_port, open_server
from selfspec_cli.gateway import server
from selfspec_cli.gateway.connection import Connections
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings
from selfspec_cli.texts.chat import CODING

EARLY, PLAIN, BITS = "early", "plain", "bits"
POLICIES = ("least_time", "round_robin")
LEAVE_SECONDS = 20.0  # of --minutes, for ending the servers
GROUP = 128  # weights that share a scale


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or `reference`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="of the whole command")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 24, 56, 100], help="requests a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="that each rate lasts")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--layer", type=int, help="exit layer; without it, all layers draft")
    parser.add_argument("--k", type=int, default=4, help="draft length, the longest one where there is a table")
    parser.add_argument("--table", help="of draft lengths by requests, such as `2:8 8:6`")
    parser.add_argument("--draft-weights", choices=tuple(DRAFT_WEIGHTS), default="int4")
    parser.add_argument("--without", nargs="*", default=[], choices=(EARLY, PLAIN, BITS), help="servers to leave out")
    parser.add_argument(
        "--cpu", action="store_true", help="try the script on a CPU: fp32, eager, text without a template"
    )
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- servers ---------------------------------------------------------------------------------------------------------


def in_four_bits(folder: Path, made: Path) -> Path:
    """A copy of a checkpoint whose layers' matrices are rounded to 4 bits, as GPTQ stores them: symmetric, GROUP inputs
    share a scale, eight rows of a transposed matrix in one int32, and zero points of 8 less one."""
    import torch
    from safetensors.torch import load_file, save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [one for one in tensors if ".layers." in one and one.endswith("proj.weight")]:
        weight = tensors.pop(name).to(device).float().T  # inputs, outputs
        groups = weight.reshape(-1, GROUP, weight.shape[1])
        scales = (groups.abs().amax(1) / 7).clamp(min=1e-8)
        codes = (groups / scales[:, None]).round().clamp(-8, 7).add(8).to(torch.int64).reshape(-1, 8, weight.shape[1])
        packed = (codes << torch.arange(0, 32, 4, device=device)[:, None]).sum(1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        base = name.removesuffix("weight")
        zeros = torch.full((scales.shape[0], scales.shape[1] // 8), 0x77777777, dtype=torch.int32)
        places = torch.arange(weight.shape[0], dtype=torch.int32) // GROUP
        tensors |= {base + "qweight": packed.cpu().contiguous(), base + "scales": scales.to(torch.float16).cpu(),
                    base + "qzeros": zeros, base + "g_idx": places}  # fmt: skip
    made.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith("index.json"):
            shutil.copy(file, made)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
                                     "desc_act": False, "checkpoint_format": "gptq"}  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def configs(given: argparse.Namespace, scratch: Path) -> dict[str, RunConfig]:
    """What each server serves."""
    name = Path(given.model).name
    model = ModelConfig(name=name, path=given.model, dtype="float32" if given.cpu else "bfloat16", max_model_len=1024)
    engine = EngineConfig(name="h100", device="cpu" if given.cpu else "cuda", enforce_eager=given.cpu,
                          max_num_seqs=64, max_num_batched_tokens=None if given.cpu else 4096,
                          gpu_memory_utilization=None if given.cpu else 0.4,
                          kv_cache_gib=0.25 if given.cpu else 8.0, enable_prefix_caching=True)  # fmt: skip
    work = WorkloadConfig(input_len=32, output_len=given.tokens, num_prompts=64)
    early = RunConfig(model=model, workload=work, engine=engine, layer=given.layer, k=given.k,
                      draft_weights=given.draft_weights, length_table=given.table, warmup=1)  # fmt: skip
    plain = replace(early, method=Method.baseline, layer=None, k=None, draft_weights="shared", length_table=None)
    found = {EARLY: early, PLAIN: plain, BITS: plain}
    if BITS not in given.without:
        folder = in_four_bits(Path(model_path(model)), scratch / f"{name}-gptq")
        four = replace(model, name=f"{name}-gptq", path=str(folder), dtype="bfloat16")
        found[BITS] = replace(plain, model=four)
    return {name: one for name, one in found.items() if name not in given.without}


@contextmanager
def opened(given: argparse.Namespace, wanted: dict[str, RunConfig], scratch: Path) -> Iterator[dict[str, Server]]:
    """All servers, started at once. Their threads live as long as the block: a process ends with its thread."""
    with ThreadPoolExecutor(len(wanted)) as pool, ExitStack() as stack:
        opening = {}
        for name, cfg in wanted.items():
            (scratch / name).mkdir()
            log = given.out.with_suffix(f".{name}.log")
            log.unlink(missing_ok=True)
            cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / name
            own = {"CUDA_VISIBLE_DEVICES": "0" if name == EARLY else "1", "VLLM_CACHE_ROOT": str(cache)}
            found = open_server(cfg, (), log, scratch / name, own)
            opening[name] = pool.submit(stack.enter_context, found)
        answering = {}
        for name, one in opening.items():
            try:
                answering[name] = one.result()
            except ServerError as error:  # the others are measured without it
                print(f"{name}: {error}", flush=True)
        yield answering


def serve_gateway(text: str) -> None:
    """In a process of its own: {"policy", "port", "folder", "backends": {name: url}}."""
    passed = json.loads(text)
    backends = [BackendSettings(name=name, kind="quantised" if name == BITS else "local", url=url)
                for name, url in passed["backends"].items()]  # fmt: skip
    settings = GatewaySettings(port=passed["port"], policy=passed["policy"], backends=backends,
                               results_dir=passed["folder"])  # fmt: skip
    settings.ledger.plain_share = 0.0
    server.serve(settings, lambda line: print(line, flush=True))


@contextmanager
def gateway(policy: str, servers: dict[str, Server], given: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """The address of a gateway in front of these servers, once all of them take requests."""
    port, folder = free_port(), scratch / policy
    passed = {"policy": policy, "port": port, "folder": str(folder),
            "backends": {name: one.url for name, one in servers.items()}}  # fmt: skip
    with open(given.out.with_suffix(f".{policy}.log"), "wb") as log:
        process = subprocess.Popen([sys.executable, __file__, "--model", given.model, "--out", str(given.out),
                                    "--gateway", json.dumps(passed)], stdout=log, stderr=log)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(150):
            with suppress(OSError, ValueError):
                if len(json.loads(ask(f"{url}/health", seconds=2.0))["backends"]) == len(servers):
                    break
            if process.poll() is not None:
                raise SystemExit(f"the gateway ended: {log.name}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


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


async def ask_one(connections: Connections, url: str, body: dict[str, Any], rate: float) -> Answer:
    """One stream."""
    found, began, rest = Answer(rate), time.perf_counter(), b""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        head = {"content-type": "application/json"}
        stream = await connections.ask("POST", url + path, head, json.dumps(body).encode(), 120.0)
        if stream.status != 200:
            raise OSError(f"HTTP {stream.status}")
        while part := await stream.read(120.0):
            found.ttft = found.ttft or time.perf_counter() - began
            rest = (rest + part)[-4096:]
        connections.give_back(stream)
        usage = re.findall(rb'"completion_tokens": ?(\d+)', rest)
        found.tokens, found.route = int(usage[-1]), stream.headers.get("x-selfspec-backend", "")
    except (OSError, IndexError) as error:
        found.failed = f"{type(error).__name__}: {error}"
    found.e2e = time.perf_counter() - began
    return found


async def load(url: str, model: str, given: argparse.Namespace) -> list[Answer]:
    """Every rate for its seconds, requests at random moments; the same ones in each run."""
    draw, tasks, connections = random.Random(0), [], Connections(5.0)
    start, at = time.perf_counter(), 0.0
    for place, rate in enumerate(given.rates):
        while at < (place + 1) * given.seconds:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            text = draw.choice(CODING)
            said = {"prompt": text} if given.cpu else {"messages": [{"role": "user", "content": text}]}
            body = {"model": model, "max_tokens": given.tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}} | said  # fmt: skip
            tasks.append(asyncio.ensure_future(ask_one(connections, url, body, rate)))
            at += draw.expovariate(rate)
    found = list(await asyncio.gather(*tasks))
    connections.close()
    return found


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """A row. seconds: from the first arrival to the last token."""

    def quantile(values: list[float], share: float) -> float | None:
        return round(1000 * sorted(values)[int(share * (len(values) - 1))], 1) if values else None

    fine = [one for one in answers if not one.failed]
    row: dict[str, Any] = {"requests": len(answers), "failed": [one.failed for one in answers if one.failed][:5]}
    for name in ("ttft", "e2e"):
        for share in (0.5, 0.99):
            row[f"{name}_p{100 * share:.0f}_ms"] = quantile([getattr(one, name) for one in fine], share)
    row["tok_s"] = round(sum(one.tokens for one in fine) / seconds, 1)
    row["routes"] = dict(Counter(one.route for one in fine if one.route))
    return row


def measured(url: str, model: str, given: argparse.Namespace) -> dict[str, Any]:
    """One run: the whole of it, and each rate."""
    began = time.perf_counter()
    answers = asyncio.run(load(url, model, given))
    row = figures(answers, time.perf_counter() - began)
    row["rates"] = {f"{rate:g}": figures([one for one in answers if one.rate == rate], given.seconds)
                    for rate in given.rates}  # fmt: skip
    return row


def main() -> None:
    given = arguments()
    if given.gateway:
        return serve_gateway(given.gateway)
    until = time.monotonic() + 60 * given.minutes - LEAVE_SECONDS
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(given).items()}, "runs": {}}

    def run(name: str, url: str, model: str) -> None:
        needed = 1.5 * given.seconds * len(given.rates)
        if time.monotonic() + needed > until:
            print(f"{name}: no time left", flush=True)
            return
        found["runs"][name] = row = measured(url, model, given)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps({key: value for key, value in row.items() if key != "rates"}), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        scratch, began = Path(folder), time.monotonic()
        wanted = configs(given, scratch)
        found |= {"device": machine.device(wanted[PLAIN]), "versions": machine.versions()}
        with opened(given, wanted, scratch) as servers:
            found["start_s"] = round(time.monotonic() - began, 1)
            print(f"{', '.join(servers)} answer after {found['start_s']} s", flush=True)
            few = argparse.Namespace(**{**vars(given), "rates": given.rates[:1], "seconds": 1.0})
            for one in servers.values():
                measured(one.url, one.model, few)  # what is made at the first request is not timed
            for name in (POLICIES[0], *servers, *POLICIES[1:]):
                if name in servers:
                    run(name, servers[name].url, servers[name].model)
                    continue
                with gateway(name, servers, given, scratch) as url:
                    run(name, url, "auto")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a library must not keep a GPU
