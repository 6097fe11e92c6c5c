"""Train the low-rank corrections of fitted copies: KL divergence to the model itself on its own answers.

    selfspec fit-weights model=./smollm2 workload=chat draft_weights=int4 --rank 32 --out int4.safetensors
    python experiments/views/train_corrections.py --model smollm2 --weights int4.safetensors --out int4-kl.safetensors
    selfspec bench model=./smollm2 workload=chat draft_weights=int4 draft_weights_path=int4-kl.safetensors

The copies stay as they are; what is trained are the matrices down and up beside them, from the closed form that the
file holds. Each token is trained as the first draft of a round: over keys and values of the full model for the tokens
before it (experiments/views/drafting.py), which is what an engine drafts over. Answers are sampled at temperature 1
from questions that the measurements do not ask. One GPU; an 8B model in bf16 takes about 16 GB for the weights, as
much for the copies dequantised, and less than that for training. On the CPU it is for small models.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from drafting import Drafting, answers, chat_prompts, library_prompts, load, padded
from torch import Tensor

from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.fitted_weights import FittedWeights

SEED = 2  # of the questions: 0 is what is measured, 1 what copies are rounded for


def divergence(drafting: Drafting, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """KL(model || view) a token in nats, mean over the tokens of `mask` [b, n], and the share of equal argmaxes."""
    target = drafting.teacher(ids)[mask].float().log_softmax(-1)
    ours = drafting.draft(ids, 1)[mask].float().log_softmax(-1)
    loss = torch.nn.functional.kl_div(ours, target, log_target=True, reduction="batchmean")
    return loss, float((ours.argmax(-1) == target.argmax(-1)).float().mean())


def train(
    drafting: Drafting, texts: list[tuple[list[int], int]], steps: int, batch: int, rate: float, seed: int = 0
) -> list[tuple[float, float]]:
    """AdamW with a linear decay to zero over `steps`, `batch` answers each; (loss, agreement) of each step."""
    device = next(drafting.model.parameters()).device
    optimizer = torch.optim.AdamW(drafting.parameters(), lr=rate, weight_decay=0.0)
    draw, history = torch.Generator().manual_seed(seed), []
    start = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        picked = torch.randperm(len(texts), generator=draw)[:batch].tolist()
        loss, agreement = divergence(drafting, *padded([texts[i] for i in picked], device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(drafting.parameters(), 1.0)
        optimizer.step()
        history.append((loss.item(), agreement))
        if step % max(1, steps // 20) == 0 or step + 1 == steps:
            last = history[-max(1, steps // 20) :]
            means = [sum(values) / len(last) for values in zip(*last, strict=True)]
            seconds = time.perf_counter() - start
            print(f"{seconds:6.0f} s  step {step + 1}/{steps}  KL {means[0]:.4f}  agreement {means[1]:.3f}", flush=True)
    return history


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    options.add_argument("--weights", type=Path, required=True, help="a file of selfspec fit-weights with corrections")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--prompts", choices=("chat", "library"), default="chat")
    options.add_argument("--answers", type=int, default=256)
    options.add_argument("--length", type=int, default=128, help="tokens of an answer, at most")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--batch", type=int, default=8, help="answers a step")
    options.add_argument("--rate", type=float, default=2e-4)  # 1e-3 learns the answers by heart (results/LOG.md)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", default="float32", help="of the model; corrections are trained in float32")
    chosen = options.parse_args()
    kind = fitted_weights.read_about(chosen.weights).kind
    fitted = fitted_weights.load(chosen.weights, kind)
    if not fitted.corrections:
        raise SystemExit(f"{chosen.weights} holds no corrections; make it with --rank 16 or more")
    model, tokenizer = load(chosen.model, chosen.device, getattr(torch, chosen.dtype))
    make = chat_prompts if chosen.prompts == "chat" else library_prompts
    texts, asked = [], min(chosen.answers, 16 if chosen.prompts == "chat" else chosen.answers)
    for part in range(-(-chosen.answers // asked)):  # the questions are few: other answers to them, each time
        prompts = make(tokenizer, asked, SEED if chosen.prompts == "chat" else SEED + part)
        texts += answers(model, tokenizer, prompts, chosen.length, 1.0, SEED + part)
    texts = [text for text in texts if len(text[0]) > text[1] + 1]
    print(f"{len(texts)} answers, {sum(len(ids) - first for ids, first in texts)} tokens", flush=True)
    drafting = Drafting(model)
    drafting.set_view(kind, fitted=fitted)
    history = train(drafting, texts, chosen.steps, chosen.batch, chosen.rate)
    more = {**fitted.about.more, "steps": chosen.steps, "rate": chosen.rate, "answers": len(texts)}
    more |= {"first_loss": history[0][0], "last_loss": history[-1][0]}
    about = replace(fitted.about, method=f"{fitted.about.method}, corrections by KL", more=more)
    made = FittedWeights(about, fitted.copies, drafting.corrections())
    print(fitted_weights.save(chosen.out, made))


if __name__ == "__main__":
    main()
