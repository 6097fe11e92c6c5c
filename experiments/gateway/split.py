"""Prefill on a plain server, decode on one with early exit: lossless, and as much accepted as on one server?

    python experiments/gateway/split.py --out split.json          # two servers on a CPU, by the example connector
    python experiments/gateway/split.py --out split.json --nixl   # likewise, by NIXL
    python experiments/gateway/split.py --out split.json --nixl --device cuda --model ./qwen2.5-coder-1.5b  # a GPU each

Each prompt is asked three times, greedily: of the server that decodes, alone; of a gateway whose backend is of kind
`split`; and of the plain server, alone. The texts have to be equal, the counts of rounds and accepted tokens those of
the first, and what was sent the keys and values of the model's own layers, written by the server that prefills.
`tokens_loaded` are those of the prompt that the decoding server did not compute itself. NIXL is in the
packages nixl and nixl-cu13 (nixl-cu12 for CUDA 12), and works on a CPU as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.engine.server import Server, free_port, open_server
from selfspec_cli.gateway import server, supervisor
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings
from selfspec_cli.texts import library

TOKENS = 48
START_SECONDS = 240.0  # until both servers answer the gateway's warm-up
COUNTS = {"tokens_loaded": "external_prefix_cache_hits_total", "nixl_bytes": "nixl_bytes_transferred_sum"}
PROMPT_CHARACTERS = 1200


def connector(given: argparse.Namespace, role: str, folder: Path) -> list[str]:
    """vLLM's options for one of the two servers."""
    name = "NixlConnector" if given.nixl else "ExampleConnector"
    options: dict[str, Any] = {"kv_connector": name, "kv_role": role}
    if given.nixl:
        options["kv_buffer_device"] = given.device
    else:
        options["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}
    return ["--kv-transfer-config", json.dumps(options)]


def start(given: argparse.Namespace, stack: ExitStack, scratch: Path, files: Path) -> dict[str, Server]:
    """Both servers, at once."""
    cuda = given.device == "cuda"
    model = ModelConfig(
        name=Path(given.model).name, path=given.model, dtype="bfloat16" if cuda else "float32", max_model_len=1024
    )
    engine = EngineConfig(
        device=given.device,
        enforce_eager=True,
        max_num_seqs=4,
        kv_cache_gib=4.0 if cuda else 0.25,
        gpu_memory_utilization=0.4 if cuda else None,
    )
    work = WorkloadConfig(input_len=256, output_len=TOKENS, num_prompts=4)
    early = RunConfig(
        model=model,
        workload=work,
        engine=engine,
        layer=given.layer,
        k=given.k,
        warmup=1,
        draft_weights=given.draft_weights,
    )
    plain = replace(early, method=Method.baseline, layer=None, k=None, draft_weights="shared")
    pool, opening = stack.enter_context(ThreadPoolExecutor(2)), {}
    for place, (name, cfg, role) in enumerate((("prefill", plain, "kv_producer"), ("decode", early, "kv_consumer"))):
        (scratch / name).mkdir()
        own = {"CUDA_VISIBLE_DEVICES": str(place), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        more = [*connector(given, role, files), "--block-size", str(given.block)]
        log = given.out.with_suffix(f".{name}.log")
        log.unlink(missing_ok=True)
        found = open_server(cfg, more, log, scratch / name, own)
        opening[name] = pool.submit(stack.enter_context, found)
    return {name: one.result() for name, one in opening.items()}


async def ask(gateway: Any, backend: str, url: str, model: str, prompt: str) -> str:
    """The text of one greedy answer: by the gateway where a backend is named, else of the server at url."""
    body = {
        "model": "auto" if backend else model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "selfspec": {"backend": backend},
    }
    if not backend:
        body.pop("selfspec")
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as found:
        raw = await found.read()
    answer = json.loads(raw)
    if found.status != 200:
        raise SystemExit(f"{backend or url}: HTTP {found.status} {raw.decode(errors='replace')}")
    return str(answer["choices"][0]["text"])


async def compare(given: argparse.Namespace, servers: dict[str, Server], files: Path, scratch: Path) -> dict[str, Any]:
    """Every prompt in three ways."""
    decode, prefill = servers["decode"], servers["prefill"]
    backend = BackendSettings(name="split", kind="split", url=decode.url, prefill=prefill.url)
    supervisor.POLL_SECONDS = 3600.0  # a server that were found down and up again would be warmed up among them
    gateway = Gateway(GatewaySettings(policy="fixed", backends=[backend], port=0, results_dir=str(scratch)))
    gateway.settings.ledger.plain_share = 0.0
    found: dict[str, Any] = {"prompts": [], "layers_sent": []}

    def counts() -> dict[str, int]:
        metrics = decode.metrics()
        known = decode.verify_counts(metrics)
        assert known is not None, "the decoding server drafts"
        of = {name: sum(metrics.get(f"vllm:{metric}", {}).values()) for name, metric in COUNTS.items()}
        return {"rounds": known.rounds, "accepted": known.accepted} | {name: int(one) for name, one in of.items()}

    async with server.opened(gateway) as looking:
        assert await looking.ready(START_SECONDS)
        web = server.server(gateway)
        task = asyncio.ensure_future(web.serve())
        while not web.started:
            await asyncio.sleep(0.05)
        url = f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
        for _, text in library.held_out_text()[: given.prompts]:
            prompt = text[-PROMPT_CHARACTERS:]
            row: dict[str, Any] = {}
            texts = {}
            for name, place, where in (
                ("decode alone", "", decode.url),
                ("split", "split", url),
                ("plain", "", prefill.url),
            ):
                for one in files.iterdir():
                    shutil.rmtree(one)
                before = counts()
                texts[name] = await ask(gateway, place, where, decode.model, prompt)
                after = counts()
                row[name] = {count: after[count] - before[count] for count in after}
                if name == "split":
                    layers = {re.sub(r"\.safetensors$", "", one.name) for one in files.rglob("*.safetensors")}
                    found["layers_sent"] = sorted({*found["layers_sent"], *layers})
            row["same_text"] = len(set(texts.values())) == 1
            found["prompts"].append(row)
            print(json.dumps(row), flush=True)
        web.should_exit = True
        await task
    log = given.out.with_suffix(".decode.log").read_text(errors="replace")
    found["injected"] = [int(one) for one in re.findall(r"Inject KV cache of (\d+) tokens", log)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--layer", type=int, default=3, help="exit layer; 0: all layers draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--draft-weights", choices=tuple(DRAFT_WEIGHTS), default="shared")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--block", type=int, default=32, help="tokens of a block of the KV cache")
    parser.add_argument("--nixl", action="store_true", help="send keys and values by NIXL")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: a GPU for each server")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.layer = given.layer or None
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        files = Path(scratch) / "keys_and_values"
        files.mkdir()
        servers = start(given, stack, Path(scratch), files)
        found = asyncio.run(compare(given, servers, files, Path(scratch)))
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "prompts"}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a library must not keep a GPU
