"""Acceptance of every view of a model, per position, with intervals: plain PyTorch, no engine.

    python experiments/views/acceptance.py --model smollm2 --out results/views/smollm2_135m_chat.csv
    python experiments/views/acceptance.py --model experiments/reference_model/model --prompts library ...

Every token of the model's own answers begins a round (experiments/views/drafting.py), greedily and sampled; intervals
are bootstrapped over answers, because rounds of one answer are not independent. The rows are written as they are found.
"""

import argparse
import csv
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from drafting import Answer, Drafting, accepted, answers, chat_prompts, library_prompts, load

from experiments.arguments import among, decimals
from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.layers import skipped_layers

KINDS = "fp8,int8,int4"
COLUMNS = (
    "model",
    "view",
    "temperature",
    "drafts",
    "answers",
    "rounds",
    "k",
    "position",
    "given_before",
    "low",
    "high",
    "all_so_far",
    "tokens_a_round",
)
RESAMPLES = 1000


def view_of(word: str, kinds: tuple[str, ...]) -> tuple[str, tuple[int, ...], str | None]:
    """A view as written: KIND, KIND@LAYERS (these are skipped), LAYERS for shared weights, or KIND=FILE."""
    kind, at, layers = word.partition("@")
    kind, equals, file = kind.partition("=")
    if not at and kind not in kinds and kind[:1].isdigit():
        kind, layers = "shared", kind
    return kind, skipped_layers(layers), file if equals else None


def views(text: str) -> list[str]:
    """A type for argparse: views with ';' or, where there is none, ',' between them."""
    from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

    words = [word.strip() for word in text.split(";" if ";" in text else ",")]
    for word in words:
        among(DRAFT_WEIGHTS, "kind of copies")(view_of(word, tuple(DRAFT_WEIGHTS))[0])
    return words


def summary(parts: list[torch.Tensor], k: int) -> list[dict[str, float]]:
    """For each position: acceptance given those before, its 95 % interval, and of all so far.

    parts: [rounds, k] of each answer.
    """
    sums = [(part.double().sum(0), len(part)) for part in parts]
    draw = random.Random(0)
    resampled = [draw.choices(range(len(sums)), k=len(sums)) for _ in range(RESAMPLES)]

    def rates(chosen: list[int]) -> list[float]:
        total, rounds = sum(sums[i][0] for i in chosen), sum(sums[i][1] for i in chosen)
        alive = [float(rounds), *total.tolist()]
        return [alive[j + 1] / alive[j] if alive[j] else float("nan") for j in range(k)]

    found, spread = rates([*range(len(sums))]), [rates(chosen) for chosen in resampled]
    total, rounds = sum(one for one, _ in sums), sum(count for _, count in sums)
    rows = []
    for j in range(k):
        ranked = sorted(value[j] for value in spread if value[j] == value[j])
        low, high = (ranked[int(share * (len(ranked) - 1))] for share in (0.025, 0.975)) if ranked else (None, None)
        so_far = float(total[j]) / rounds
        rows.append({"position": j + 1, "given_before": found[j], "low": low, "high": high, "all_so_far": so_far})
    return rows


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    options.add_argument("--name", help="in the rows; the folder's name")
    options.add_argument(
        "--views", type=views, default=KINDS, help="by ';' or ',': KIND, KIND@LAYERS, LAYERS, KIND=FILE"
    )
    options.add_argument("--prompts", choices=("chat", "library"), default="chat")
    options.add_argument("--answers", type=int, default=12)
    options.add_argument("--length", type=int, default=96, help="tokens of an answer, at most")
    options.add_argument("--temperatures", type=decimals, default="0,0.8")
    options.add_argument("--k", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--out", type=Path, required=True)
    return options.parse_args()


def main() -> None:
    chosen = arguments()
    from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

    model, tokenizer = load(chosen.model, chosen.device, getattr(torch, chosen.dtype))
    prompts = (chat_prompts if chosen.prompts == "chat" else library_prompts)(tokenizer, chosen.answers, chosen.seed)
    texts = {t: answers(model, tokenizer, prompts, chosen.length, t, chosen.seed) for t in chosen.temperatures}
    drafting = Drafting(model)
    known = {
        t: [
            Answer.of(drafting, torch.tensor(ids, device=model.device), first, t)
            for ids, first in some
            if len(ids) - first > chosen.k
        ]
        for t, some in texts.items()
    }
    name, start = chosen.name or Path(chosen.model).name, time.perf_counter()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with open(chosen.out, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for word in chosen.views:
            kind, skipped, path = view_of(word, tuple(DRAFT_WEIGHTS))
            drafting.set_view(kind, skipped, None if path is None else fitted_weights.load(path, kind))
            shown = (
                f"{kind} {Path(path).stem}"
                if path
                else f"{kind} without {word.partition('@')[2] or word}"
                if skipped
                else kind
            )
            for temperature in chosen.temperatures:
                found = [accepted(drafting, answer, chosen.k, temperature) for answer in known[temperature]]
                for drafts in found[0]:
                    parts = [one[drafts].cpu() for one in found]
                    rows = summary(parts, chosen.k)
                    tokens = 1 + sum(row["all_so_far"] for row in rows)
                    about = {
                        "model": name,
                        "view": shown,
                        "temperature": temperature,
                        "drafts": drafts,
                        "k": chosen.k,
                        "answers": len(parts),
                        "rounds": sum(map(len, parts)),
                        "tokens_a_round": f"{tokens:.3f}",
                    }
                    for row in rows:
                        table.writerow(
                            about | {key: f"{v:.4g}" if isinstance(v, float) else v for key, v in row.items()}
                        )
                    file.flush()
                    first_row = rows[0]
                    print(
                        f"{time.perf_counter() - start:5.0f} s  {shown:<28} T={temperature:g} {drafts:<12} first "
                        f"{first_row['given_before']:.3f} ({first_row['low']:.3f} to {first_row['high']:.3f}), "
                        f"tokens {tokens:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
