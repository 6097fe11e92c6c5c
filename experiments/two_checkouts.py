"""Two checkouts of selfspec on one GPU, beside plain decoding: whether anything has become slower between them.

    python experiments/two_checkouts.py --old ../old --model 8b --out checkouts_8b.json
    python experiments/two_checkouts.py --old ../old --model ./reference_widened --out checkouts_widened.json

Three engines live at once, each in a process of its own: plain decoding, early exit of the old checkout, early exit of
this one. `--engines old,new,again` has a second engine of this checkout in the place of plain decoding: by how much two
engines of one checkout differ is what the host adds. Only one of them works at a time. They take turns, whose order is
turned round each time, and the figures are medians of the turns.

`--steps` also says where the time of a run goes, on the host and on the device (`in_steps`), so that a difference of
two checkouts is known to be in handing requests on, in the number of steps, in the order of reading and launching, in
what the host does in a step, or in a part of the device's work. Recording takes some microseconds a step.

8b: the shape of Llama 3 8B with random weights, the first 8 of 32 layers, k=3, acceptance set to 3. A folder: its first
--layer layers on copies (--draft-weights), --k drafts, on code that the reference model has not seen. The file is
written after each turn of all engines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("plain", "old", "new", "again")
INPUT_LEN = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the folder of the other checkout")
    parser.add_argument("--model", required=True, help="8b, or a folder")
    parser.add_argument("--engines", default="plain,old,new", help="of " + ", ".join(ENGINES))
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--draft-weights", default="int8")
    parser.add_argument("--batches", type=int, nargs="+", help="requests at once; 1 32 of 8b, else 1 8 32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="of keys and values, for each engine")
    parser.add_argument(
        "--memory-share", type=float, default=0.28, help="of the GPU's memory that each engine may take"
    )
    parser.add_argument("--seconds", type=float, default=580.0, help="after which no turn begins")
    parser.add_argument("--steps", action="store_true", help="also where the time of a run goes")
    parser.add_argument("--cpu", action="store_true", help="try the script: fp32, eager")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # this process is that one
    given = parser.parse_args()
    given.engines = given.engines.split(",")
    if unknown := set(given.engines) - set(ENGINES):  # by hand: the old checkout may lack what helps with it
        parser.error(f"--engines: {', '.join(unknown)}; allowed are {', '.join(ENGINES)}")
    given.batches = given.batches or ([1, 32] if given.model == "8b" else [1, 8, 32])
    return given


def engine_arguments(given: argparse.Namespace) -> dict[str, Any]:
    shape = given.model == "8b"
    folder = str(ROOT / "experiments" / "shapes" / "llama3_8b") if shape else given.model
    found: dict[str, Any] = {
        "model": folder, "skip_tokenizer_init": True, "dtype": "float32" if given.cpu else "bfloat16",
        "max_model_len": 512 if given.cpu else 1024, "max_num_seqs": 128 if shape else 32, "seed": 0,
        "enable_prefix_caching": False, "gpu_memory_utilization": given.memory_share, "enforce_eager": given.cpu,
        "kv_cache_memory_bytes": int(given.kv_gib * 2**30), "disable_log_stats": False,
    }  # fmt: skip
    drafts: dict[str, Any] = {"method": "layer_skip", "layer_skip": given.layer, "num_speculative_tokens": given.k,
                              "draft_weights": given.draft_weights}  # fmt: skip
    if shape:
        found["load_format"] = "dummy"
        drafts = {"method": "layer_skip", "layer_skip": 8, "num_speculative_tokens": 3,
                  "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}  # fmt: skip
    return found if given.engine == "plain" else found | {"speculative_config": drafts}


def prompts(given: argparse.Namespace) -> list[list[int]]:
    """Token ids for the largest batch: random ones of a shape, or code."""
    generator, count = random.Random(0), max(given.batches)
    if given.model == "8b":
        return [[generator.randrange(1000, 100_000) for _ in range(INPUT_LEN)] for _ in range(count)]
    from tokenizers import Tokenizer

    from selfspec_cli.texts.library import held_out_text

    tokenizer = Tokenizer.from_file(f"{given.model}/tokenizer.json")
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for _, text in held_out_text()]
    texts = [ids for ids in texts if len(ids) > 8 * INPUT_LEN]
    starts = [int(generator.random() * (len(texts[n % len(texts)]) - INPUT_LEN)) for n in range(count)]
    return [texts[n % len(texts)][start : start + INPUT_LEN] for n, start in enumerate(starts)]


def record_steps(worker: Any) -> None:
    """Called in the process of an engine's worker: from now on its steps are kept, for `in_steps`.

    It wraps vLLM's own methods and nothing of selfspec's, so it fits every checkout, and plain decoding.
    """
    import torch

    runner = worker.model_runner
    execute, sample = runner.execute_model, runner.sample_tokens
    steps: list[dict[str, Any]] = []
    worker.recorded_steps = steps

    def moment() -> tuple[float, Any]:
        """Now, and an event at this place of the device's work."""
        event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if event is not None:
            event.record()
        return time.perf_counter(), event

    def execute_model(scheduled: Any, *arguments: Any, **more: Any) -> Any:
        if not scheduled.num_scheduled_tokens:
            return execute(scheduled, *arguments, **more)
        behind = bool(steps) and "read" not in steps[-1]
        step = {"rows": len(scheduled.num_scheduled_tokens), "new": len(scheduled.scheduled_new_reqs), "behind": behind}
        steps.append(step | {"begin": moment()})
        answer = execute(scheduled, *arguments, **more)
        steps[-1]["forward"] = moment()
        return answer

    def sample_tokens(*arguments: Any, **more: Any) -> Any:
        answer, step = sample(*arguments, **more), steps[-1]
        step["end"], get_output = moment(), getattr(answer, "get_output", None)

        def read() -> Any:
            output = get_output()  # type: ignore[misc]
            step["read"] = time.perf_counter()
            return output

        if get_output is None:  # without asynchronous scheduling
            step["read"] = time.perf_counter()
        else:
            answer.get_output = read
        return answer

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def in_steps(worker: Any) -> dict[str, Any]:
    """Called in the process of an engine's worker after a run: what its steps were, times in milliseconds.

    steps; with_new: those that new requests joined; full: the others that had as many requests as any. Of these:
    read_first: the share that was launched after the tokens of the step before were read. Medians: host_to_forward,
    from those tokens to the end of launching the forward pass, in steps of that order; host_launch, of a whole step. On
    the device, where work that is launched late makes the part before it longer: idle, between two steps; forward;
    drafting: sampling and what is behind it; round: all of them, and longest the longest.
    """
    import torch

    steps, worker.recorded_steps[:] = list(worker.recorded_steps), []
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(1000 * seconds)

    most = max((step["rows"] for step in steps), default=0)
    full = [(before, step) for before, step in pairwise(steps) if step["rows"] == most and not step["new"]]
    for before, step in full:
        if not step["behind"] and "read" in before:
            add("host_to_forward", step["forward"][0] - before["read"])
        add("host_launch", step["end"][0] - step["begin"][0])
        marks = [before["end"][1], step["begin"][1], step["forward"][1], step["end"][1]]
        if None not in marks:
            for name, (one, other) in zip(("idle", "forward", "drafting"), pairwise(marks), strict=True):
                add(name, one.elapsed_time(other) / 1000)
            add("round", marks[0].elapsed_time(marks[-1]) / 1000)
    return {
        "steps": len(steps), "with_new": sum(step["new"] > 0 for step in steps), "full": len(full),
        "read_first": sum(not step["behind"] for _, step in full) / len(full) if full else None,
        **{name: round(statistics.median(values), 3) for name, values in found.items()},
        **({"longest": round(max(found["round"]), 3)} if "round" in found else {}),
    }  # fmt: skip


def serve(given: argparse.Namespace, asked: list[list[int]], answers: TextIO) -> None:
    """Be one engine: for each line of standard input, a number of requests, a line of what they took."""
    from vllm import LLM, SamplingParams

    import selfspec_cli

    if given.steps:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file go to the engine's process
    began = time.perf_counter()
    llm = LLM(**engine_arguments(given))
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True, detokenize=False)

    def drafted() -> tuple[float, float]:
        """Rounds and accepted drafts so far."""
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return (values.get("vllm:spec_decode_num_drafts", 0), values.get("vllm:spec_decode_num_accepted_tokens", 0))

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    handed_on = [0.0]  # when the engine got the last request
    add_request: Any = llm.llm_engine.add_request

    def add_and_look(*arguments: Any, **more: Any) -> Any:
        added = add_request(*arguments, **more)
        handed_on[0] = time.perf_counter()
        return added

    if given.steps:
        llm.llm_engine.add_request = add_and_look  # type: ignore[method-assign]
        llm.collective_rpc(record_steps)
    say({"start_s": time.perf_counter() - began, "checkout": str(Path(selfspec_cli.__file__).parents[1])})
    for line in sys.stdin:
        before, began = drafted(), time.perf_counter()
        done = llm.generate([{"prompt_token_ids": ids} for ids in asked[: int(line)]], params, use_tqdm=False)
        seconds, after = time.perf_counter() - began, drafted()
        rounds, outputs = after[0] - before[0], [list(one.outputs[0].token_ids) for one in done]
        answer = {"batch": int(line), "tok_s": sum(map(len, outputs)) / seconds, "outputs": outputs,
                  "accepted_a_round": (after[1] - before[1]) / rounds if rounds else None}  # fmt: skip
        if given.steps:
            handing_on = {"handing_on": round(1000 * (handed_on[0] - began), 3)}
            answer["in_steps"] = handing_on | llm.collective_rpc(in_steps)[0]
        say(answer)
    os._exit(0)


class Far:
    """An engine in a process of its own."""

    def __init__(self, name: str, checkout: Path, place: Path) -> None:
        self.log = place / f"{name}.log"
        path = os.pathsep.join([str(checkout), str(entry_point(place)), os.environ.get("PYTHONPATH", "")])
        reading, writing = os.pipe()
        environment = os.environ | {"PYTHONPATH": path, "ANSWERS": str(writing),
                                    "VLLM_CACHE_ROOT": str(place / f"cache_{name}")}  # fmt: skip
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--engine", name], stdin=subprocess.PIPE, stdout=log,
                stderr=log, env=environment, pass_fds=[writing], start_new_session=True, text=True,
            )  # fmt: skip
        os.close(writing)
        self._answers = os.fdopen(reading)

    def read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"an engine has ended: {self.log.read_text(errors='replace')[-3000:]}")
        return dict(json.loads(line))

    def ask(self, batch: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(batch, file=self._process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def entry_point(place: Path) -> Path:
    """A folder that makes vLLM load the plugin of whichever checkout comes first on the path."""
    info = place / "site" / "selfspec-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: selfspec\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nselfspec = selfspec_cli.vllm_plugin:register\n")
    return info.parent


def middle(found: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each number over some runs."""
    names = dict.fromkeys(name for one in found for name, value in one.items() if value is not None)
    return {
        name: round(statistics.median(one[name] for one in found if one.get(name) is not None), 3) for name in names
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By requests at once: tokens a second of each engine, median (least to greatest), and their ratios."""
    shown: dict[str, Any] = {}
    for batch in dict.fromkeys(run["batch"] for run in runs):
        here = [run for run in runs if run["batch"] == batch]
        speeds = {name: [run["tok_s"] for run in here if run["engine"] == name] for name in ENGINES}
        median = {name: statistics.median(found) for name, found in speeds.items() if found}
        row: dict[str, Any] = {
            name: {"tok_s": round(median[name], 1), "least": round(min(speeds[name]), 1),
                   "greatest": round(max(speeds[name]), 1)} for name in median
        }  # fmt: skip
        for one, other in (("new", "old"), ("again", "new"), ("old", "plain"), ("new", "plain")):
            if one in median and other in median:
                row[f"{one} over {other}"] = round(median[one] / median[other], 3)
        row |= {
            f"{name} in steps": found
            for name in median
            if (found := middle([run["in_steps"] for run in here if run["engine"] == name and "in_steps" in run]))
        }
        last = {run["engine"]: run["outputs"] for run in here}
        if {"old", "new"} <= last.keys():
            row["equal outputs"] = sum(map(list.__eq__, last["old"], last["new"]))
        shown[str(batch)] = row
    return shown


def main() -> None:
    given = arguments()
    asked = prompts(given)
    if given.engine:
        return serve(given, asked, os.fdopen(int(os.environ["ANSWERS"]), "w"))
    until = time.monotonic() + given.seconds
    found: dict[str, Any] = {"model": given.model, "repeats": given.repeats, "started": {}}
    runs: list[dict[str, Any]] = []
    place = Path(tempfile.mkdtemp(prefix="two_checkouts_"))
    old = given.old.resolve()
    engines = {name: Far(name, old if name == "old" else ROOT, place) for name in given.engines}

    def keep() -> None:
        kept = [{key: value for key, value in run.items() if key != "outputs"} for run in runs]
        text = json.dumps(found | {"compared": compared(runs), "runs": kept}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")

    try:
        for name, engine in engines.items():
            found["started"][name] = engine.read()
        for batch in given.batches:
            for turn in range(-1, given.repeats):  # the first one warms up
                if time.monotonic() > until:
                    break
                for name in given.engines[:: 1 if turn % 2 else -1]:
                    answer = engines[name].ask(batch)
                    runs += [{"engine": name} | answer] if turn >= 0 else []
                keep()
            print(batch, json.dumps(compared(runs).get(str(batch))), flush=True)
    finally:
        for engine in engines.values():
            engine.end()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
