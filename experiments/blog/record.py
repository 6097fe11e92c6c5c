"""Record how two engines write the same text, for `streams.py` to draw.

    python experiments/blog/record.py --out streams.json --title "..." \
        model=./qwen2.5-coder-1.5b draft_weights=int4 k=12 workload=coding workload.output_len=256 engine=gpu
    python experiments/blog/streams.py streams.json --out docs/blog/streams_qwen.svg

The settings describe one point of `selfspec sweep`. Its engine, then the baseline's, continue one prompt of the
workload `--repeats` times, one request at a time; the repeat of median length is kept. The file is written after each
engine. `streams.py` needs both, and refuses a recording whose texts differ. On a GPU texts cannot be made again later.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from experiments.arguments import one_run
from selfspec_cli.config.keys import baseline_of, run_key
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.engine.live import Engine, open_engine
from selfspec_cli.texts.prompts import workload_prompts


def stream(engine: Engine, prompt: list[int], length: int) -> list[tuple[float, list[int]]]:
    """Run one request; return the seconds since it was sent and all tokens so far, after each output."""
    from vllm import SamplingParams

    core, outputs = engine.llm.llm_engine, []
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    core.add_request(engine.new_request(), {"prompt_token_ids": prompt}, sampling)
    while core.has_unfinished_requests():
        for output in core.step():
            outputs.append((time.perf_counter() - began, list(output.outputs[0].token_ids)))
    return outputs


def recorded(cfg: RunConfig, number: int, repeats: int) -> dict[str, Any]:
    """Return the prompt's text, and the text and time of each output of one engine."""
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
    options = parser.parse_args()
    cfg = one_run(parser, options.words)
    document: dict[str, Any] = {"title": options.title, "slower": options.slower, "arms": {}}
    for name, arm in (("early_exit", cfg), ("baseline", baseline_of(cfg))):
        recording = recorded(arm, options.prompt, options.repeats)
        document["prompt"] = recording.pop("prompt")
        document["arms"][name] = {"id": run_key(arm)} | recording
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {recording['steps'][-1]['seconds']:.3f} s, {len(recording['steps'])} outputs", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
