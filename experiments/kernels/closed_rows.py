"""What requests whose drafts have ended cost in the rest of a draft loop.

    python experiments/kernels/closed_rows.py --out results/closed_rows.json
    python experiments/kernels/closed_rows.py --out closed.json --sizes 4 model=reference layer=3 k=4 engine=cpu \
        engine.max_num_seqs=4 engine.enforce_eager=true

A closed request does no attention work, but its row stays in every product of the loop. At 4 and 32 requests, one to
three of them draft a single token and the others k: the loop's time beside that of the open requests alone, which is
the most that moving them together inside a round could win, and beside that of a full batch. On a GPU between two
events around the loop, medians of all rounds; on the CPU by the host's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[2]))

from selfspec_cli.early_exit.request_settings import K
from selfspec_cli.engine.live import Engine, open_engine
from selfspec_cli.scripts import numbers, one_run

WORDS = (
    "model=llama3_8b_shape",
    "perplexity_tokens=0",
    "workload.prompts=random",
    "engine=h100",
    "engine.max_num_seqs=32",
    "layer=8",
    "k=6",
    "draft_weights=int4",
)
CLOSED = (1, 2, 3)


def seconds_of_loops(engine: Engine, requests: int, closed: int, tokens: int) -> list[float]:
    """Seconds of each draft loop of a batch in which `closed` of the requests draft one token."""
    from vllm import SamplingParams

    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    drafter = getattr(runner, "speculator", None) or runner.drafter
    found, propose, before = [], drafter.propose, drafter.counters.snapshot()

    def watch(*args: Any, **more: Any) -> Any:
        drafts = propose(*args, **more)
        seconds = drafter.clock.seconds() if hasattr(drafter, "clock") else None
        if seconds is not None and args[0].num_reqs == requests:
            found.append(seconds)
        return drafts

    drafter.propose = watch
    own = [1 if number < closed else engine.cfg.k for number in range(requests)]
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args={K: k})
        for k in own
    ]
    prompts = [{"prompt_token_ids": [7 + number] * 32} for number in range(requests)]
    try:
        engine.llm.generate(prompts, parameters, use_tqdm=False)
    finally:
        del drafter.propose
    after = drafter.counters.snapshot()
    if hasattr(drafter, "clock"):
        found = found[3:]  # it lags behind by up to three loops, which are those of the batch before
    else:
        found.append((after["seconds"] - before["seconds"]) / (after["rounds"] - before["rounds"]))
    if not found:
        sys.exit(f"three loops at most had all {requests} requests, of which {closed} end early: try more --tokens")
    return found


def measured(engine: Engine, requests: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each number of closed requests; milliseconds of a median loop, and the loops that were timed."""

    def loop(number: int, closed: int) -> tuple[float, int]:
        seconds = seconds_of_loops(engine, number, closed, tokens)
        return 1000 * statistics.median(seconds), len(seconds)

    loop(requests, 0)  # warms up
    (full, _), rows = loop(requests, 0), []
    for closed in (one for one in CLOSED if one < requests):
        (some, loops), (alone, loops_alone) = loop(requests, closed), loop(requests - closed, 0)
        rows.append(
            {
                "requests": requests,
                "closed": closed,
                "loop_ms": some,
                "all_open_ms": full,
                "open_alone_ms": alone,
                "cost_of_closed": some / alone - 1,
                "loops": loops,
                "loops_alone": loops_alone,
            }
        )
        print(
            f"{requests} requests, {closed} of them closed after one draft: {some:.3f} ms; the open ones alone "
            f"{alone:.3f}; all open {full:.3f} ({loops} and {loops_alone} loops)",
            flush=True,
        )
    return rows


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--sizes", type=numbers, default="4,32", help="numbers of requests")
    options.add_argument("--tokens", type=int, default=120, help="of each request")
    options.add_argument("words", nargs="*", metavar="KEY=VALUE")
    chosen = options.parse_args()
    typed = {word.partition("=")[0] for word in chosen.words}
    kept = [word for word in WORDS if word.partition("=")[0] not in typed]
    cfg = one_run(options, [*kept, *chosen.words])
    rows: list[dict[str, Any]] = []
    with open_engine(cfg) as engine:
        for size in chosen.sizes:
            rows += measured(engine, size, chosen.tokens)
            chosen.out.write_text(json.dumps({"words": [*kept, *chosen.words], "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os._exit(main())  # what was measured is written; an engine takes long to go
