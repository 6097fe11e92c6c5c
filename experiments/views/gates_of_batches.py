"""What a confidence gate brings where several requests draft together, by drafts of a real model and no engine.

    python experiments/views/gates_of_batches.py --model qwen2.5-coder-0.5b --log drafts.json --out FILE

First every token of the model's own greedy answers begins a draft on copies of all layers (drafting.py), and how sure
each step was and whether it was right is written to --log, which a second run reads. From that the rounds of any rule
follow: each of some requests goes through answers of its own, and a round takes its fixed time and that of its longest
draft, for a batch drafts as long as any of its requests does. Rules:

    fixed   so many drafts in every round, 1 to 12
    each    a request drafts while the product of its greatest probabilities (survival) is at least a threshold
    any     all requests draft while that of one of them is
    mean    all requests draft while the mean over them is

What is printed is tokens a request and millisecond, and how much a rule at its best threshold gains over the best fixed
length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from drafting import Answer, Drafting, accepted, answers, chat_prompts, load
from torch import Tensor

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.scripts import among

LONGEST = 12
KINDS = ("chat", "coding")
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
COSTS = {1: (2.03, 0.56), 8: (2.19, 1.06), 32: (3.03, 1.66)}
"""By requests, milliseconds of a round without its draft steps and of a draft step: the coder of 1.5 B on 4-bit copies
on H200s. In results/LOG.md 1 and 8 are the profile's on one host; at 32 the draft steps are of "Why is a draft step of
16 to 32 tokens slow?", and their round, of 11.3 ms, of the first host's performance check."""


class Drafts(NamedTuple):
    """Of every token of an answer that can begin a draft, [n, 12]: survival, and whether all so far are right."""

    survival: Tensor
    right: Tensor


def lengths(rule: str, threshold: float, survival: Tensor) -> Tensor:
    """How long each request drafts in a round, int64 [requests]; survival [requests, 12]."""
    if rule == "fixed":
        return torch.full((len(survival),), int(threshold))
    open_ = {"each": survival, "any": survival.amax(0, keepdim=True), "mean": survival.mean(0, keepdim=True)}[rule]
    steps = 1 + (open_[:, : LONGEST - 1] >= threshold).int().cumprod(1).sum(1)
    return steps.expand(len(survival))


def speed(drafts: list[Drafts], requests: int, rule: str, threshold: float, rounds: int) -> float:
    """Tokens a request and millisecond."""
    draw, (beside, step) = random.Random(0), COSTS[requests]
    places = [(each, draw.randrange(len(each.survival))) for each in draw.choices(drafts, k=requests)]
    tokens = time = 0.0
    for _ in range(rounds):
        drafted = lengths(rule, threshold, torch.stack([each.survival[at] for each, at in places]))
        gained = [
            int(each.right[at, :length].sum()) for (each, at), length in zip(places, drafted.tolist(), strict=True)
        ]
        time += beside + step * int(drafted.max())
        tokens += sum(gained) + requests
        for number, (each, at) in enumerate(places):
            place = at + gained[number] + 1
            places[number] = (each, place) if place < len(each.survival) else (draw.choice(drafts), 0)
    return tokens / requests / time


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    options.add_argument("--weights", type=among(DRAFT_WEIGHTS, "kind of copies"), default="int4")
    options.add_argument("--answers", type=int, default=16, help="of each kind")
    options.add_argument("--length", type=int, default=128, help="tokens of an answer")
    options.add_argument("--rounds", type=int, default=1500, help="of each rule")
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    if not chosen.log.exists():
        model, tokenizer = load(chosen.model, "cpu", torch.float32)
        made = {}
        for kind in KINDS:
            prompts = chat_prompts(tokenizer, chosen.answers, 0, kind, 96)
            made[kind] = answers(model, tokenizer, prompts, chosen.length, 0.0, 0)
        drafting = Drafting(model)
        drafting.set_view(chosen.weights)
        log: dict[str, list[dict[str, Any]]] = {kind: [] for kind in made}
        for kind, (ids, first) in ((kind, one) for kind, some in made.items() for one in some):
            if len(ids) - first > LONGEST:
                answer = Answer.of(drafting, torch.tensor(ids), first, 0.0)
                found = accepted(drafting, answer, LONGEST, survival=True)
                log[kind].append({"survival": found["survival"].tolist(), "right": found["most likely"].tolist()})
        chosen.log.write_text(json.dumps(log), encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for kind, logged in json.loads(chosen.log.read_text(encoding="utf-8")).items():
        drafts = [Drafts(torch.tensor(each["survival"]), torch.tensor(each["right"])) for each in logged]
        for requests in COSTS:
            fixed = 0.0
            for rule in ("fixed", "each", "any", "mean"):
                tried = range(1, LONGEST + 1) if rule == "fixed" else THRESHOLDS
                best, at = max((speed(drafts, requests, rule, one, chosen.rounds), one) for one in tried)
                fixed = fixed or best
                rows.append({"workload": kind, "requests": requests, "rule": rule, "at": at,
                             "tokens_ms": round(best, 4), "over_fixed": round(best / fixed, 3)})  # fmt: skip
                print(rows[-1], flush=True)
    document = {"model": Path(chosen.model).name, "weights": chosen.weights, "length": chosen.length,
                "answers": chosen.answers, "rounds": chosen.rounds, "rows": rows}  # fmt: skip
    chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
