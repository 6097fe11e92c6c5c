"""Record how two engines write the same text, for `streams.py` to draw: on a GPU, where no text is made twice.

    python experiments/blog/record.py --out streams.json --title "..." \
        model=./qwen2.5-coder-1.5b draft_weights=int4 k=12 workload=coding workload.output_len=256 engine=h100
    python experiments/blog/streams.py streams.json --out docs/blog/streams_qwen.svg

The words are those of one point of `selfspec sweep`. Its engine, then the baseline's, write one prompt of the workload
`--repeats` times, one request at a time; the repeat of median length is kept. The file is written after each engine.
`streams.py` wants both, and refuses a recording whose texts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import baseline_of, run_key
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.engine.live import Engine, open_engine
from selfspec_cli.scripts import one_run
from selfspec_cli.texts.prompts import workload_prompts


def stream(engine: Engine, prompt: list[int], length: int) -> list[tuple[float, list[int]]]:
    """One request: after each output the seconds since it was sent, and all tokens so far."""
    from vllm import SamplingParams

    core, found = engine.llm.llm_engine, []
    asked = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    core.add_request(engine.new_request(), {"prompt_token_ids": prompt}, asked)
    while core.has_unfinished_requests():
        for output in core.step():
            found.append((time.perf_counter() - began, list(output.outputs[0].token_ids)))
    return found


def recorded(cfg: RunConfig, number: int, repeats: int) -> dict[str, Any]:
    """The prompt's text, and what one engine wrote when."""
    with open_engine(cfg) as engine:
        prompt = workload_prompts(cfg, engine)[number]
        length = cfg.workload.output_len
        runs = [stream(engine, prompt, length) for _ in range(repeats + 1)][1:]  # the first is for warming up
        chosen = sorted(runs, key=lambda run: run[-1][0])[len(runs) // 2]
        decode = engine.llm.get_tokenizer().decode
        before, steps = decode(prompt), []
        for seconds, tokens in chosen:
            text = decode(prompt + tokens)
            steps.append({"seconds": seconds, "tokens": len(tokens), "text": text[len(before) :]})
            before = text
        return {"prompt": decode(prompt), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=0, help="number of the prompt, from 0 on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--title", required=True, help="what drafts, in words, for the picture")
    parser.add_argument("--slower", type=int, default=4, help="how much slower the picture runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    cfg = one_run(parser, given.words)
    found: dict[str, Any] = {"title": given.title, "slower": given.slower, "arms": {}}
    for name, one in (("early_exit", cfg), ("baseline", baseline_of(cfg))):
        made = recorded(one, given.prompt, given.repeats)
        found["prompt"] = made.pop("prompt")
        found["arms"][name] = {"id": run_key(one)} | made
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {made['steps'][-1]['seconds']:.3f} s, {len(made['steps'])} outputs", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
