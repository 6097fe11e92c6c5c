"""The one line against plain vLLM and against every fixed draft length, on live engines of one host, in turns.

    python experiments/one_line/engines.py MODEL OUT.json --batches 1,4,16,32,64 --repeats 3
    python experiments/one_line/engines.py MODEL OUT.json --beside before=CHECKOUT "plain 0.33=SITE" 0.33=SITE
    python experiments/one_line/engines.py MODEL OUT.json --beside 'lookup={"draft_weights": "none"}'

Three engines live at once: plain vLLM, `{"method": "selfspec"}`, which keeps what it learns as a server does, and
another one of those for the fixed lengths (the rule switched off, a table of one entry). Each has a process for its
steps and one that reads its tokens, as under `vllm serve`. While one generates, the others are idle. Each repeat asks
the same questions; the arms take turns, in another order each time, and a row has the medians. Prompts are this
project's own.

--beside adds engines. Each has a name and either more keys of the one line's speculative_config, in JSON, or a folder
that is put first on its PYTHONPATH, such as another checkout or another vLLM. They draft by the rule, unless their name
begins with "plain".
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIXED = (0, 2, 3, 4, 6, 8, 12)
RULE, PLAIN = "rule", "plain"


def serve(arguments: dict[str, Any]) -> None:
    """A process with one engine: reads a job a line, answers with a line. arguments: of vLLM's LLM."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(**arguments)
    tokenizer = llm.get_tokenizer()

    def chat(question: str) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer.encode(question))
        asked_for = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(tokenizer.apply_chat_template([{"role": "user", "content": question}], **asked_for))

    def ask(job: dict[str, Any]) -> dict[str, Any]:
        set_length(llm, job.get("length"))
        prompts = [{"prompt_token_ids": chat(question)} for question in job["questions"]]
        prompts = (prompts * -(-job["batch"] // len(prompts)))[: max(job["batch"], len(prompts))]
        params = SamplingParams(temperature=job.get("temperature", 0), max_tokens=job["tokens"], ignore_eos=True)
        outputs, seconds = [], 0.0
        before = steps(llm)
        for first in range(0, len(prompts), job["batch"]):
            part = prompts[first : first + job["batch"]]
            since = time.perf_counter()
            answers = llm.generate(part, params, use_tqdm=False)
            seconds += time.perf_counter() - since
            outputs += [list(answer.outputs[0].token_ids) for answer in answers]
        made = {width: number - before[width] for width, number in steps(llm).items() if number > before[width]}
        tokens = sum(map(len, outputs))
        return {"seconds": seconds, "tokens": tokens, "outputs": [hash(tuple(ids)) for ids in outputs], "steps": made}

    print(json.dumps({"started": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        print("ANSWER " + json.dumps(ask(json.loads(line))), flush=True)
    os._exit(0)  # vLLM's shutdown may wait for minutes


def steps(llm: Any) -> dict[int, int]:
    """Steps that an engine has planned so far, by draft slots of a request; nothing of a plain engine."""
    counters = [metric for metric in llm.get_metrics() if metric.name == "vllm:selfspec_steps_by_draft_slots"]
    return {int(counter.labels["slots"]): int(counter.value) for counter in counters}


def set_length(llm: Any, length: int | None) -> None:
    """A fixed draft length; None: an engine as it was started."""
    if length is not None:
        llm.collective_rpc("early_exit_set_gate", args=("none", None))
        llm.collective_rpc("early_exit_set_length_table", args=(f"1:{length}",))


class Worker:
    """A process that runs `serve`."""

    def __init__(self, arguments: dict[str, Any], log: Path, path: str = "") -> None:
        environment = os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        if path:
            environment["PYTHONPATH"] = f"{path}:{environment.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )

    def started(self) -> float:
        return float(self._read('{"started"')["started"])

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read("ANSWER ")

    def _read(self, prefix: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(prefix):
                return dict(json.loads(line.removeprefix("ANSWER ")))
        raise RuntimeError(f"the engine ended with {self._process.wait()}")


def row(name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [answer["tokens"] / answer["seconds"] for answer in answers]
    return {
        "arm": name,
        "tok_s": round(statistics.median(speeds), 1),
        "all": [round(s, 1) for s in speeds],
        "steps": answers[-1]["steps"],
    }


def main() -> None:
    from selfspec_cli.texts.questions import chosen  # here, because an engine may run another checkout's selfspec

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", default="1,4,16,32,64,128,256")
    parser.add_argument("--prompts", default="coding,chat,edits")
    parser.add_argument("--fixed", default=",".join(map(str, FIXED)))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--count", type=int, default=8, help="prompts of the small batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480, help="no new cell is begun after this")
    parser.add_argument("--llm", default="{}", help="more arguments of vLLM's LLM, in JSON")
    parser.add_argument("--spec", default='{"method": "selfspec"}', help="the one line, or one with set acceptance")
    parser.add_argument("--beside", nargs="*", default=[], metavar="NAME=JSON|PATH", help="further engines")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats: at least 2, because plain vLLM's second run is compared with its first")
    began = time.perf_counter()
    common = {
        "model": args.model,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **json.loads(args.llm),
    }
    drafting, logs = common | {"speculative_config": json.loads(args.spec)}, args.out.parent
    fixed = [int(k) for k in args.fixed.split(",") if k]
    engines = {PLAIN: (common, ""), RULE: (drafting, "")} | ({"fixed": (drafting, "")} if fixed else {})
    for name, other in (words.split("=", 1) for words in args.beside):
        if other.startswith("{"):
            named = drafting["speculative_config"] | json.loads(other)
            engines[name] = (drafting | {"speculative_config": named}, "")
        else:
            engines[name] = (common if name.startswith(PLAIN) else drafting, other)
    workers = {
        name: Worker(arguments, logs / f"{name.replace(' ', '_')}.log", path)
        for name, (arguments, path) in engines.items()
    }
    document: dict[str, Any] = {"started": {name: worker.started() for name, worker in workers.items()}, "cells": []}
    arms: list[tuple[str, Worker, int | None]] = [
        (name, worker, None) for name, worker in workers.items() if name != "fixed"
    ]
    arms += [(f"k={k}", workers["fixed"], k) for k in fixed]
    for batch in map(int, args.batches.split(",")):
        for prompts in args.prompts.split(","):
            if time.perf_counter() - began > args.seconds:
                break
            job = {"questions": chosen(args.count, 0, prompts), "batch": batch, "tokens": args.tokens}
            # Once untimed: graphs that run for the first time, and the rule's first trials.
            for _, worker, length in arms:
                worker.ask(job | {"length": length})
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in arms}
            for repeat in range(args.repeats):
                turn = repeat * len(arms) // args.repeats
                for name, worker, length in arms[turn:] + arms[:turn]:
                    answers[name].append(worker.ask(job | {"length": length}))
            rows = [row(name, found) for name, found in answers.items()]
            same = {
                name: sum(a == b for a, b in zip(found[0]["outputs"], answers[PLAIN][0]["outputs"], strict=True))
                for name, found in answers.items()
            }
            again = sum(a == b for a, b in zip(*(one["outputs"] for one in answers[PLAIN][:2]), strict=True))
            document["cells"].append(
                {"batch": batch, "prompts": prompts, "rows": rows, "same_as_plain": same, "plain_as_itself": again}
            )
            args.out.write_text(json.dumps(document, indent=1))
            speed = {one["arm"]: one["tok_s"] for one in rows}
            of_fixed = [(value, name) for name, value in speed.items() if name.startswith("k=")]
            best = max(of_fixed or [(speed[PLAIN], PLAIN)])
            print(
                f"{batch:4d} {prompts:7s} plain {speed[PLAIN]:8.0f}  rule {speed[RULE]:8.0f} "
                f"{speed[RULE] / speed[PLAIN]:.2f}x  best {best[1]} {best[0]:8.0f}, "
                f"rule {speed[RULE] / best[0]:.2f} of it  {rows[1]['steps']}  "
                f"same {same[RULE]} of {len(answers[PLAIN][0]['outputs'])} (plain again {again})",
                flush=True,
            )
    print(document["started"], f"{time.perf_counter() - began:.0f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if "--engine" in sys.argv:
        serve(json.loads(sys.argv[sys.argv.index("--engine") + 1]))
    else:
        main()
