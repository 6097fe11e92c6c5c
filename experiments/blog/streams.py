"""Two streams side by side, from a measured run: plain decoding and early exit write the same text, at their own pace.

    python experiments/blog/streams.py results/published/blog.jsonl.xz --out docs/blog/streams.svg [--prompt 0]
    python experiments/blog/streams.py streams.json --out docs/blog/streams_qwen.svg      # a recording of record.py

The folder holds the points of a sweep on the embedded reference model: a baseline, and an arm of early exit behind gate
varH. They have the time at which each output of each request came, and a digest of its tokens. The text is not among
them. It is made again here in plain PyTorch, and so is how many tokens each output held: with the model's own tokens
given, one pass says what its first E layers would have drafted at each place, and where the gate would have closed.
This ends with an error if a text does not have the digest of the run, or if there would be another number of outputs
than were recorded. So the picture shows what was measured and nothing else. It is one SVG that moves by itself (SMIL),
needs no network and no script, and runs slower than the recording.
"""

import argparse
import html
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.arguments import existing
from selfspec_cli.config.paths import reference_model_dir
from selfspec_cli.record import folder
from selfspec_cli.record.point import Point, output_digests
from selfspec_cli.texts import library

WIDTH, MARGIN, GAP, LINE, TOP = 960, 16, 16, 18, 74
COLUMNS, ROWS = 52, 22  # characters of a line, lines of a panel
SLOWER = 4  # how much slower than the recording the picture runs
PAUSE = 3.0  # seconds of the picture after the last token


# ---- what each output held --------------------------------------------------------------------------------------


def written(prompt: list[int], length: int, model: Any) -> list[int]:
    """What the model writes greedily after `prompt`: token ids [length]."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
        )
    return made[0, len(prompt) :].tolist()


def step_lengths(prompt: list[int], text: list[int], arm: dict[str, Any], model: Any) -> list[int]:
    """How many tokens of `text` each output of early exit held: the prompt's own token, then a round each.

    arm: E, k and threshold of a varH gate. A round drafts at most k tokens, goes on while the varentropy of the last
    draft's distribution is at most the threshold, and yields the drafts that the text agrees with, and one token more.
    """
    import torch

    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt + text]), output_hidden_states=True).hidden_states[arm["E"]]
        logs = model.lm_head(model.model.norm(hidden))[0].float().log_softmax(-1)  # [tokens, vocabulary]
    p = logs.exp()
    entropy = -(p * logs).sum(-1)
    varentropy = (p * (logs + entropy[:, None]) ** 2).sum(-1)
    best = logs.argmax(-1)
    lengths, done, first = [1], 1, len(prompt) - 1
    while done < len(text):
        accepted = 0
        # The draft at place i reads the token before it; the first E layers give it the same whatever follows.
        for place in range(done, min(done + arm["k"], len(text))):
            if int(best[first + place]) != text[place]:
                break
            accepted += 1
            if float(varentropy[first + place]) > arm["threshold"]:
                break
        lengths.append(min(accepted + 1, len(text) - done))
        done += lengths[-1]
    return lengths


def recorded(points: list[Point], prompt_number: int) -> dict[str, Any]:
    """The two streams of one prompt, from the repeat of median length; exits with a message where anything differs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    place = str(reference_model_dir())
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    plain = next(point for point in points if point.arm["arm"] == "baseline")
    early = next(point for point in points if point.arm["arm"] == "layer_skip")
    work = plain.arm
    prompts = library.token_windows(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        library.held_out_text(),
        work["input_len"],
        8,
        work["seed"],
    )
    prompt = prompts[prompt_number]
    text = written(prompt, work["output_len"], model)
    for point in (plain, early):
        if point.outputs[prompt_number] != output_digests([text])[0]:
            sys.exit(f"the text made here is not that of {point.id}")
    lengths = {plain.id: [1] * len(text), early.id: step_lengths(prompt, text, early.arm, model)}
    pieces = [tokenizer.decode(prompt), *text_pieces(tokenizer, prompt, text)]
    arms = {
        name: {"id": point.id, "arm": point.arm, "steps": steps_of(point, prompt_number, lengths[point.id], pieces[1:])}
        for name, point in (("baseline", plain), ("early_exit", early))
    }
    return {"prompt": pieces[0], "arms": arms}


def text_pieces(tokenizer: Any, prompt: list[int], text: list[int]) -> list[str]:
    """What each token of `text` adds to the text before it."""
    so_far = [tokenizer.decode(prompt + text[:end]) for end in range(len(text) + 1)]
    return [after[len(before) :] for before, after in pairwise(so_far)]


def steps_of(point: Point, number: int, lengths: list[int], pieces: list[str]) -> list[dict[str, Any]]:
    """When each output of a prompt came, and what it held, in the repeat in which that prompt took the median time."""
    requests = sorted(
        (repeat.requests[number] for repeat in point.repeats), key=lambda one: one.events[-1] - one.arrival
    )
    chosen = requests[len(requests) // 2]
    if len(chosen.events) != len(lengths):
        sys.exit(f"{point.id}: {len(chosen.events)} outputs were recorded, and {len(lengths)} were made here")
    steps, done = [], 0
    for moment, count in zip(chosen.events, lengths, strict=True):
        piece = "".join(pieces[done : done + count])
        done += count
        steps.append({"seconds": moment - chosen.arrival, "tokens": done, "text": piece})
    return steps


# ---- drawing ----------------------------------------------------------------------------------------------------


def question(prompt: str) -> str:
    """What the picture shows of a prompt: of a chat in ChatML, as Qwen writes it, the user's last message alone.

    >>> question("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nWhy?<|im_end|>\\n")
    'Why?\\n\\n'
    """
    message = prompt.rpartition("<|im_start|>user\n")[2]
    return prompt if message == prompt else message.partition("<|im_end|>")[0] + "\n\n"


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
    slower = found.get("slower", SLOWER)
    whole = max(step["seconds"] for step in last.values()) * slower + PAUSE
    panel = (WIDTH - 2 * MARGIN - GAP) / 2
    laid = {name: laid_out(question(found["prompt"]), arm["steps"]) for name, arm in arms.items()}
    shown = min(ROWS, 1 + max(place[0] for placed in laid.values() for place in placed))
    height = TOP + shown * LINE + 64
    titles = {"baseline": "plain decoding", "early_exit": found.get("title") or in_words(arms["early_exit"]["arm"])}
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
    for place, name in enumerate(arms):
        left = MARGIN + place * (panel + GAP)
        parts.append(f'<rect class="b" x="{left}" y="{MARGIN}" width="{panel}" height="{height - 2 * MARGIN}" rx="6"/>')
        parts.append(f'<text class="h" x="{left + 14}" y="42">{html.escape(titles[name])}</text>')
        parts += [_piece(left, each, slower / whole, whole, name) for each in laid[name] if each[0] < shown]
        parts.append(_bar(left, panel, height, last[name], (slower, whole), place + 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def in_words(arm: dict[str, Any]) -> str:
    """An arm of early exit as a title."""
    return f"early exit: first {arm['E']} of 24 layers draft up to {arm['k']}"


def _piece(left: float, placed: tuple[int, int, str, float, int], part: float, whole: float, name: str) -> str:
    """One piece of text, which appears when it was recorded; what a check of several drafts brought is marked."""
    row, column, text, seconds, tokens = placed
    x, y = left + 14 + column * 7.8, TOP + row * LINE
    kind = "p" if not seconds else "n" if name == "early_exit" and tokens > 1 else ""
    head = f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * 7.8:.1f}" class="{kind}" xml:space="preserve"'
    return f"{head}>{html.escape(text)}{_appears(seconds * part, whole)}</text>"


def _appears(share: float, whole: float) -> str:
    """Hidden for that share of a loop of `whole` seconds, then shown until it ends."""
    if not share:
        return ""
    return (
        f'<animate attributeName="opacity" values="0;0;1;1" keyTimes="0;{share:.5f};{share:.5f};1" '
        f'dur="{whole:.2f}s" repeatCount="indefinite" calcMode="discrete"/>'
    )


def _bar(left: float, panel: float, height: float, last: dict[str, Any], pace: tuple[int, float], kind: int) -> str:
    """A bar that fills while the stream runs, and below it how long the stream took."""
    slower, whole = pace
    y, wide, share = height - 56, panel - 28, last["seconds"] * slower / whole
    rate = last["tokens"] / last["seconds"]
    return (
        f'<rect class="t" x="{left + 14}" y="{y}" width="{wide}" height="8" rx="4"/>'
        f'<rect class="f{kind}" x="{left + 14}" y="{y}" width="{wide}" height="8" rx="4">'
        f'<animate attributeName="width" values="0;{wide};{wide}" keyTimes="0;{share:.5f};1" dur="{whole:.2f}s" '
        'repeatCount="indefinite"/></rect>'
        f'<text class="s" x="{left + 14}" y="{y + 26}">{last["tokens"]} tokens in {last["seconds"]:.2f} s, '
        f"{rate:.0f} tok/s (shown {slower} times slower)</text>"
    )


def made_again(results: Path, prompt: int) -> dict[str, Any]:
    """`recorded` of a folder of points."""
    points, warnings = folder.read(results)
    if warnings:
        sys.exit("\n".join(warnings))
    return recorded(points, prompt)


def read(recording: Path) -> dict[str, Any]:
    """A file of record.py; exits with a message where the two texts are not the same."""
    found: dict[str, Any] = json.loads(recording.read_text(encoding="utf-8"))
    texts = {"".join(step["text"] for step in arm["steps"]) for arm in found["arms"].values()}
    if len(found["arms"]) != 2 or len(texts) != 1:
        sys.exit(f"{recording}: it does not hold the same text twice")
    found["arms"] = {name: found["arms"][name] for name in ("baseline", "early_exit")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=existing)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=0, help="number of the prompt, from 0 on")
    asked = parser.parse_args()
    found = read(asked.results) if asked.results.suffix == ".json" else made_again(asked.results, asked.prompt)
    asked.out.write_text(drawn(found), encoding="utf-8")
    for name, arm in found["arms"].items():
        last = arm["steps"][-1]
        print(f"{name}: {last['tokens']} tokens, {len(arm['steps'])} outputs, {last['seconds']:.3f} s ({arm['id']})")


if __name__ == "__main__":
    main()
