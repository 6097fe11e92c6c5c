"""lm-evaluation-harness and guidellm as clients of a server that `selfspec serve` starts; what they print is kept.

    python experiments/serving/clients.py --out results/serving --guidellm /path/to/its/venv/bin/guidellm

lm-evaluation-harness is the extra `eval`. guidellm's dependencies do not go together with vLLM's, so it lives in a
virtual environment of its own: python -m venv guidellm && guidellm/bin/pip install guidellm. Nothing is downloaded: the
tasks are made of the standard library's text. The server with drafting is started from a tuned file, with what
`selfspec tune` chose in the published run (results/published/gates.jsonl.xz). Each server, with drafting and
without, is asked the same, and the scores must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec_cli.artifacts import tuned
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.paths import reference_model_dir
from selfspec_cli.record import archive

SETTINGS = ["engine.enforce_eager=true", "engine.max_num_seqs=4", "engine.kv_cache_gib=0.25"]
CHOICE = Path(__file__).parents[2] / "results" / "published" / "gates.jsonl.xz" / "tune" / "choice.json"
ARMS = {"early exit": ["tuned=reference"], "plain": ["method=baseline"]}
MODULES = ("textwrap", "bisect", "heapq", "string", "shlex", "glob")
GENERATE = """
task: next_line
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/lines.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{next}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 40, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: which_line
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/lines.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: 0
doc_to_choice: "{{[next, other]}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def tasks(folder: Path, count: int) -> None:
    """Documents {text, next, other}: twelve lines of a module, the line after them, and another line of it."""
    documents = []
    for name in MODULES:
        module = __import__(name)
        lines = [line for line in Path(str(module.__file__)).read_text(encoding="utf-8").splitlines() if line.strip()]
        for start in range(20, len(lines) - 14, 9):
            text = "\n".join(lines[start : start + 12]) + "\n"
            documents.append({"text": text, "next": lines[start + 12], "other": lines[start - 9]})
    step = max(len(documents) // count, 1)
    chosen = [json.dumps(document) for document in documents[::step][:count]]
    (folder / "lines.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    for name, text in (("next_line", GENERATE), ("which_line", CHOOSE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")


def write_tuned(folder: Path) -> None:
    """conf/tuned/ in `folder`, as `selfspec tune` would have written it there."""
    words = json.loads(archive.read_text(CHOICE))["overrides"]
    (found_best,) = compose_runs(None, words, sweep=False)
    tuned.write(folder / "conf", found_best, tuned.overrides(found_best), f"the choice of {CHOICE.name}")


@contextmanager
def serving(words: list[str], log: Path) -> Iterator[str]:
    """A server, started in the folder of its log; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "selfspec_cli", "serve", *words, *SETTINGS, "--", "--port", str(port), "--host",
               "127.0.0.1"]  # fmt: skip
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=log.parent)
    try:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        if process.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def counted(address: str) -> str:
    """The server's own counters of drafts."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:(spec_decode_num_(?:drafts|draft_tokens|accepted_tokens)_total)\S* (\S+)$", text, re.M)
    said = ", ".join(f"{name} {float(value):g}" for name, value in found) or "no drafts"
    return f"## the server's counters afterwards\n{said}"


def drafting(log: Path) -> str:
    """What the server's log says about drafts."""
    said = re.findall(r"drafting with layers .*", log.read_text(encoding="utf-8"))
    return str(said[0]) if said else "no drafts"


def run(title: str, command: list[str]) -> str:
    """What a client prints, with its command before it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "160",
                          "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"})  # fmt: skip
    text = done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}"
    return f"## {title}\n$ {' '.join([Path(command[0]).name, *command[1:]])}\n{text}\n"


def lm_eval(address: str, folder: Path, model: str) -> str:
    args = f"model={model},base_url={address}/v1/completions,num_concurrent=2,max_retries=1,max_length=1024"
    words = ["--model", "local-completions", "--model_args", args, "--include_path", str(folder)]
    words += ["--tasks", "next_line,which_line"]
    return run("lm-evaluation-harness", [sys.executable, "-m", "lm_eval", *words])


def guidellm(program: str, address: str, model: str, requests: int) -> str:
    data = "kind=synthetic_text,prompt_tokens=32,output_tokens=48"
    return run("guidellm", [program, "run", "--backend", f"kind=openai_http,target={address},"
               "request_format=/v1/completions", "--profile",
               "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={requests}", "--tokenizer",
               f"kind=huggingface_auto,model={model}", "--data", data, "--output", "kind=console",
               "--disable-console-interactive"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--guidellm", help="its program; left out without one")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--arm", choices=ARMS, action="append", help="one arm alone")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended too
    model = str(reference_model_dir())
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks(folder, given.documents)
        write_tuned(folder)
        for arm in given.arm or ARMS:
            log, file = folder / "server.log", given.out / f"clients_{arm.replace(' ', '_')}.txt"
            hidden = {model: "MODEL", str(folder): "TASKS", sys.prefix: "VENV"}
            words = " ".join(["selfspec serve", *ARMS[arm], *SETTINGS])
            with serving(ARMS[arm], log) as address:
                asked = [lambda: lm_eval(address, folder, model), lambda: counted(address)]
                if given.guidellm:
                    asked.insert(1, lambda: guidellm(given.guidellm, address, model, given.requests))
                keep(file, f"# {arm}: {words}\n\n## the server's log\n{drafting(log)}\n", hidden, "w")
                for ask in asked:  # each is kept as soon as it is there
                    keep(file, ask(), hidden)
            print(file)


def keep(file: Path, text: str, hidden: dict[str, str], mode: str = "a") -> None:
    """Add to the transcript, with this machine's paths replaced."""
    for path, name in hidden.items():
        text = text.replace(path, name)
    with open(file, mode, encoding="utf-8") as out:
        out.write(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text) + "\n")


if __name__ == "__main__":
    main()
