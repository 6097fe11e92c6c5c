"""Two streams side by side, from a real run: when each token came, with plain decoding and with early exit.

    python experiments/blog/streams.py record [--out results/published/blog/streams.json] [--layer 3] [--k 4]
    python experiments/blog/streams.py draw   [--out docs/blog/streams.svg]

`record` starts vLLM twice in this process on the embedded reference model, lets each engine write the same text
greedily a few times, and keeps the run of median length of each: the text that every step of the engine brought, and
the seconds from the request to it. It ends with an error if the two texts differ or if no draft was accepted. The times
are those of the machine and of what else ran there; the load stands in the file. `draw` makes one SVG of that file that
moves by itself (SMIL), needs no network and no script, and shows the times as they were recorded, slowed down.
"""

from __future__ import annotations

import argparse
import datetime
import html
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "experiments" / "reference_model" / "model"
RECORD = ROOT / "results" / "published" / "blog" / "streams.json"
PICTURE = ROOT / "docs" / "blog" / "streams.svg"
PROMPT = "def read_config(path, default=None):\n    "
REPEATS = 5

WIDTH, MARGIN, GAP, LINE, TOP = 960, 16, 16, 18, 74
COLUMNS, ROWS = 52, 22  # characters of a line, lines of a panel
SLOWER = 6  # how much slower than the recording the picture runs
PAUSE = 3.0  # seconds of the picture after the last token


# ---- recording --------------------------------------------------------------------------------------------------


def stream(llm: Any, prompt: str, length: int) -> list[tuple[float, str, int]]:
    """One greedy request: (seconds since it was sent, text so far, tokens so far) after each step that brought any."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    engine, seen = llm.llm_engine, []
    began = time.perf_counter()
    engine.add_request(f"stream-{began}", prompt, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            completion = output.outputs[0]
            seen.append((time.perf_counter() - began, completion.text, len(completion.token_ids)))
    return seen


def recorded(speculative: dict[str, Any] | None, length: int, eager: bool) -> dict[str, Any]:
    """The median of `REPEATS` streams of an engine of its own, and the seconds of all of them."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(MODEL), dtype="float32", max_num_seqs=4, max_model_len=512, kv_cache_memory_bytes=2**28,
              enable_prefix_caching=False, speculative_config=speculative, disable_log_stats=False,
              enforce_eager=eager)  # fmt: skip
    stream(llm, PROMPT, length)  # warm-up
    streams = sorted((stream(llm, PROMPT, length) for _ in range(REPEATS)), key=lambda steps: steps[-1][0])
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    steps, before = [], ""
    for seconds, text, tokens in streams[REPEATS // 2]:
        steps.append({"seconds": round(seconds, 5), "tokens": tokens, "text": text[len(before) :]})
        before = text
    found = {
        "speculative_config": speculative,
        "seconds_of_all": [round(each[-1][0], 4) for each in streams],
        "drafted": int(counted.get("vllm:spec_decode_num_draft_tokens", 0)),
        "accepted": int(counted.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "text": before,
        "steps": steps,
    }
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return found


def record(out: Path, layer: int, k: int, length: int, eager: bool) -> None:
    """Record both arms and write the file; exits with a message if they do not show what they should."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")  # on a CPU it compiles again at each start (docs/serving.md)
    import torch
    import vllm

    load = list(os.getloadavg())
    early = {"method": "layer_skip", "layer_skip": layer, "num_speculative_tokens": k}
    arms = {"baseline": recorded(None, length, eager), "early_exit": recorded(early, length, eager)}
    if arms["baseline"]["text"] != arms["early_exit"]["text"]:
        sys.exit("the two texts differ")
    if not arms["early_exit"]["accepted"]:
        sys.exit("no draft was accepted")
    found = {
        "what": "one greedy request of the embedded reference model, run of median length of each arm",
        "command": f"python experiments/blog/streams.py record --layer {layer} --k {k} --length {length}"
        + (" --eager" if eager else ""),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": load,
        "load_after": list(os.getloadavg()),
        "prompt": PROMPT,
        "arms": arms,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print({name: arm["seconds_of_all"] for name, arm in arms.items()}, arms["early_exit"]["accepted"])


# ---- drawing ----------------------------------------------------------------------------------------------------


def laid_out(prompt: str, steps: list[dict[str, Any]]) -> list[tuple[int, int, str, float, int]]:
    """Where each piece of text stands: (line, column, text, seconds, tokens of its step), long lines broken."""
    row, column, before, placed = 0, 0, 0, []
    for seconds, count, text in [(0.0, 0, prompt)] + [(s["seconds"], s["tokens"], s["text"]) for s in steps]:
        piece = ""
        for letter in text:
            if letter == "\n" or column + len(piece) == COLUMNS:
                placed.append((row, column, piece, seconds, count - before))
                row, column, piece = row + 1, 0, ""
            if letter != "\n":
                piece += letter
        placed.append((row, column, piece, seconds, count - before))
        column, before = column + len(piece), count
    return [each for each in placed if each[2].strip()]


def drawn(found: dict[str, Any]) -> str:
    """The SVG of a recording: both streams, each with its clock, in one loop of the slower one's length."""
    arms = found["arms"]
    last = {name: arm["steps"][-1] for name, arm in arms.items()}
    whole = max(step["seconds"] for step in last.values()) * SLOWER + PAUSE
    panel = (WIDTH - 2 * MARGIN - GAP) / 2
    shown = min(ROWS, 1 + max(place[0] for arm in arms.values() for place in laid_out(found["prompt"], arm["steps"])))
    height = TOP + shown * LINE + 64
    titles = {"baseline": "plain decoding", "early_exit": in_words(arms["early_exit"]["speculative_config"])}
    took = " and ".join(f"{last[name]['seconds']:.2f} s ({titles[name]})" for name in arms)
    about = f"The same text as two engines wrote it, side by side, in {took}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{about}">',
        "<style>text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#24292f;white-space:pre}"
        ".h{font:600 16px system-ui,sans-serif}.s{font:13px system-ui,sans-serif;fill:#57606a}.p{fill:#8c959f}"
        ".n{fill:#0a6b3d;font-weight:600}.b{fill:#fff;stroke:#d0d7de}.t{fill:#eaeef2}.f1{fill:#8c959f}.f2{fill:#1a7f37}"
        "</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#f6f8fa"/>',
    ]
    for place, (name, arm) in enumerate(arms.items()):
        left = MARGIN + place * (panel + GAP)
        parts.append(f'<rect class="b" x="{left}" y="{MARGIN}" width="{panel}" height="{height - 2 * MARGIN}" rx="6"/>')
        parts.append(f'<text class="h" x="{left + 14}" y="42">{html.escape(titles[name])}</text>')
        placed = laid_out(found["prompt"], arm["steps"])
        parts += [_piece(left, each, whole, name) for each in placed if each[0] < shown]
        parts.append(_bar(left, panel, height, last[name], whole, place + 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def in_words(config: dict[str, Any]) -> str:
    """A speculative_config as a title."""
    return f"early exit: first {config['layer_skip']} of 24 layers draft up to {config['num_speculative_tokens']}"


def _piece(left: float, placed: tuple[int, int, str, float, int], whole: float, name: str) -> str:
    """One piece of text, which appears when it was recorded; what a check of several drafts brought is marked."""
    row, column, text, seconds, tokens = placed
    x, y = left + 14 + column * 7.8, TOP + row * LINE
    kind = "p" if not seconds else "n" if name == "early_exit" and tokens > 1 else ""
    head = f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * 7.8:.1f}" class="{kind}" xml:space="preserve"'
    return f"{head}>{html.escape(text)}{_appears(seconds, whole)}</text>"


def _appears(seconds: float, whole: float) -> str:
    """Hidden until `seconds` of the recording, then shown until the loop ends."""
    if not seconds:
        return ""
    share = seconds * SLOWER / whole
    return (f'<animate attributeName="opacity" values="0;0;1;1" keyTimes="0;{share:.5f};{share:.5f};1" '
            f'dur="{whole:.2f}s" repeatCount="indefinite" calcMode="discrete"/>')  # fmt: skip


def _bar(left: float, panel: float, height: float, last: dict[str, Any], whole: float, kind: int) -> str:
    """A bar that fills while the stream runs, and below it how long the stream took."""
    y, wide, share = height - 56, panel - 28, last["seconds"] * SLOWER / whole
    rate = last["tokens"] / last["seconds"]
    return (f'<rect class="t" x="{left + 14}" y="{y}" width="{wide}" height="8" rx="4"/>'
            f'<rect class="f{kind}" x="{left + 14}" y="{y}" width="{wide}" height="8" rx="4">'
            f'<animate attributeName="width" values="0;{wide};{wide}" keyTimes="0;{share:.5f};1" dur="{whole:.2f}s" '
            'repeatCount="indefinite"/></rect>'
            f'<text class="s" x="{left + 14}" y="{y + 26}">{last["tokens"]} tokens in {last["seconds"]:.2f} s, '
            f'{rate:.0f} tokens a second (shown {SLOWER} times slower)</text>')  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "draw"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recording", type=Path, default=RECORD)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--eager", action="store_true", help="compile nothing: an engine starts sooner and runs slower")
    asked = parser.parse_args()
    if asked.verb == "record":
        return record(asked.out or RECORD, asked.layer, asked.k, asked.length, asked.eager)
    found = json.loads(asked.recording.read_text(encoding="utf-8"))
    (asked.out or PICTURE).parent.mkdir(parents=True, exist_ok=True)
    (asked.out or PICTURE).write_text(drawn(found), encoding="utf-8")


if __name__ == "__main__":
    main()
