"""Train the reference model with the LayerSkip recipe, or the same model plainly as its control.

    train.py prepare --work W                       collect the text, train the tokenizer, tokenise
    train.py train --work W --recipe R --steps N    train, evaluate on held-out text, export

README.md in this folder has the commands as they were run. `--tiny` runs anything on a CPU in seconds.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from architecture import TINY, Llama, Shape, export, rms_norm
from data import Windows, prepare
from torch import Tensor

EVALUATIONS = 12


@dataclass(frozen=True)
class Recipe:
    """Exit losses alternate: each step has one exit of every group, and the final layer's loss with weight 1."""

    groups: tuple[tuple[int, ...], ...] = ()
    weights: tuple[float, ...] = ()
    soft_share: float = 0.0  # of an exit's target: the final layer's distribution; the rest is the true next token
    max_layer_dropout: float = 0.0

    def exits(self, step: int) -> tuple[int, ...]:
        return tuple(group[step % len(group)] for group in self.groups)


def recipe(args: argparse.Namespace) -> Recipe:
    if args.recipe == "plain":
        return Recipe()
    groups = ((1,), (2,), (3,)) if args.tiny else ((2, 3, 4), (6, 8), (12, 16, 20))
    return Recipe(groups, weights=(0.15, 0.2, 0.1), soft_share=0.75, max_layer_dropout=0.05)


def shape(args: argparse.Namespace) -> Shape:
    return TINY if args.tiny else Shape()


def layer_dropout_rates(layers: int, maximum: float) -> Tensor:
    """LayerSkip's rates [layers]: 0 at the first layer, growing exponentially to `maximum` at the last."""
    return maximum * (torch.exp2(torch.arange(layers) / (layers - 1)) - 1)


def losses(
    states: list[Tensor], norm: Tensor, embedding: Tensor, eps: float, targets: Tensor, soft_share: float
) -> Tensor:
    """Mean losses [exits], in the order of `states`; the last state is the final layer's and teaches the others.

    states: residual streams [batch, time, hidden]; targets: [batch, time] next token ids. The loss of an exit is its
    cross-entropy to a mixture of the true next token and, by `soft_share`, the final layer's (detached) distribution.
    """
    result, teacher = [], None
    head = embedding.to(states[-1].dtype)
    for h in reversed(states):
        logits = F.linear(rms_norm(h, norm, eps), head).float()
        partition = logits.logsumexp(-1)
        loss = partition - logits.gather(-1, targets[..., None]).squeeze(-1)
        if teacher is None:
            teacher = logits.detach().softmax(-1).to(h.dtype)
        else:
            loss = (1 - soft_share) * loss + soft_share * (partition - (logits * teacher.float()).sum(-1))
        result.append(loss.mean())
    return torch.stack(result[::-1])


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.recipe, self.args = recipe(args), args
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.model = Llama(shape(args)).to(args.device)
        self.losses = losses
        if args.device == "cuda":
            for layer in self.model.layers:
                layer.compile()
            self.losses = torch.compile(losses)
        matrices = [p for p in self.model.layers.parameters() if p.ndim == 2]
        chosen = set(matrices)
        others = [p for p in self.model.parameters() if p not in chosen]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        stream = torch.from_numpy(np.load(args.work / "train.npy").astype(np.int32)).to(args.device)
        self.windows = Windows(stream, shape(args).positions, args.batch, args.seed)
        self.rates = layer_dropout_rates(shape(args).layers, self.recipe.max_layer_dropout).to(args.device)
        self.tokens_per_step = args.batch * shape(args).positions

    def lr(self, step: int) -> float:
        """Warm-up over 100 steps, constant, then linear to zero over the last 45 % of the steps."""
        steps = self.args.steps
        return self.args.lr * min(1.0, (step + 1) / 100, (steps - step) / (0.45 * steps))

    def step(self, step: int) -> Tensor:
        """One optimiser step; returns the losses [exits + 1], the final layer's last."""
        batch = self.windows(step)
        ids, targets = batch[:, :-1], batch[:, 1:].contiguous()
        keep = None
        if self.recipe.max_layer_dropout:
            draws = torch.rand(len(self.rates), len(ids), device=ids.device)
            keep = (draws >= self.rates[:, None]).to(self.dtype)
        exits = self.recipe.exits(step)
        model = self.model
        states = model.hidden_states(ids, (*exits, model.shape.layers), self.dtype, keep)
        parts = self.losses(
            states, model.norm.weight, model.embed_tokens.weight, model.shape.rms_eps, targets, self.recipe.soft_share
        )
        weights = torch.tensor((*self.recipe.weights, 1.0), device=ids.device)
        (parts * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return parts.detach()

    def state(self, step: int) -> dict:
        return {"step": step, "model": self.model.state_dict(), "optim": [o.state_dict() for o in self.optimizers]}

    def restore(self, state: dict) -> int:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optim"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]


@torch.no_grad()
def evaluate(model: Llama, stream: Tensor, dtype: torch.dtype, max_windows: int | None = None) -> dict:
    """Held-out figures of every exit: perplexity, and agreement (equal argmax) with the last layer.

    stream: [tokens], cut into windows of the model's length, every token predicted once, teacher forced.
    """
    length, layers = model.shape.positions, model.shape.layers
    count = (len(stream) - 1) // length
    starts = torch.arange(count, device=stream.device) * length
    if max_windows is not None and max_windows < count:
        starts = starts[:: -(-count // max_windows)]
    offsets = torch.arange(length + 1, device=stream.device)
    nll, agreement, correct = torch.zeros(3, layers, dtype=torch.float64, device=stream.device)
    tokens = 0
    with torch.compiler.set_stance("force_eager"):
        for chunk in starts.split(16):
            windows = stream[chunk[:, None] + offsets].long()
            states = model.hidden_states(windows[:, :-1], tuple(range(1, layers + 1)), dtype)
            targets = windows[:, 1:]
            final = model.logits(states[-1]).argmax(-1)
            for index, h in enumerate(states):
                logits = model.logits(h).float()
                nll[index] += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                agreement[index] += (logits.argmax(-1) == final).sum()
                correct[index] += (logits.argmax(-1) == targets).sum()
            tokens += targets.numel()
    return {
        "tokens": tokens,
        "perplexity": [round(x, 4) for x in (nll / tokens).exp().tolist()],
        "agreement": [round(x, 4) for x in (agreement / tokens).tolist()],
        "accuracy": [round(x, 4) for x in (correct / tokens).tolist()],
    }


def brief(figures: dict) -> str:
    layers = len(figures["perplexity"])
    shown = [e for e in (1, 2, 3, 4, 6, 8, 12, 16, 20) if e < layers]
    agreement = " ".join(f"{e}:{figures['agreement'][e - 1]:.3f}" for e in shown)
    return f"held-out perplexity {figures['perplexity'][-1]:.3f}  agreement {agreement}"


def train(args: argparse.Namespace) -> None:
    """Train one recipe; leaves log.jsonl, checkpoint.pt, metrics.json and model/ in the folder WORK/RECIPE."""
    out = args.work / args.recipe
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    held_out = torch.from_numpy(np.load(args.work / "held_out.npy").astype(np.int32)).to(args.device)
    checkpoint = out / "checkpoint.pt"
    first = trainer.restore(torch.load(checkpoint)) if args.resume and checkpoint.exists() else 0
    with (out / "log.jsonl").open("a") as log:

        def record(line: str, **fields) -> None:
            print(args.recipe, f"{fields['step']}/{args.steps}", line, flush=True)
            log.write(json.dumps(fields) + "\n")
            log.flush()

        started = marked = time.time()
        marked_step = first
        for step in range(first, args.steps):
            parts = trainer.step(step)
            done = step + 1
            if done % 50 == 0 or done == args.steps:
                values = [round(x, 4) for x in parts.tolist()]
                if not math.isfinite(values[-1]):
                    raise FloatingPointError(f"loss {values} at step {done}")
                speed = trainer.tokens_per_step * (done - marked_step) / (time.time() - marked)
                line = f"losses {values} {speed / 1e6:.3f} M tokens/s"
                exits = trainer.recipe.exits(step)
                record(line, step=done, exits=exits, losses=values, lr=trainer.lr(step), tokens_per_s=speed)
                marked, marked_step = time.time(), done
            if done % max(1, args.steps // EVALUATIONS) == 0 and done < args.steps:
                figures = evaluate(trainer.model, held_out, trainer.dtype, max_windows=96)
                record(brief(figures), step=done, **figures)
                torch.save(trainer.state(done), checkpoint)
    finish(args, trainer, held_out, out, time.time() - started)


def finish(args: argparse.Namespace, trainer: Trainer, held_out: Tensor, out: Path, seconds: float) -> None:
    """Evaluate the weights as exported (rounded to bf16, computed in fp32) and write metrics.json and model/."""
    model = trainer.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    figures = evaluate(model, held_out, torch.float32)
    chosen = trainer.recipe
    settings = {
        "recipe": args.recipe,
        "exit_groups": chosen.groups,
        "exit_weights": chosen.weights,
        "soft_share": chosen.soft_share,
        "max_layer_dropout": chosen.max_layer_dropout,
        "steps": args.steps,
        "batch": args.batch,
        "length": model.shape.positions,
        "lr": args.lr,
        "seed": args.seed,
        "train_tokens": args.steps * trainer.tokens_per_step,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (out / "metrics.json").write_text(json.dumps({"settings": settings, "held_out": figures}, indent=1) + "\n")
    export(model, out / "model")
    shutil.copy(args.work / "tokenizer.json", out / "model")
    print(f"{args.recipe} FINISHED in {seconds:.0f} s: {brief(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("prepare", "train"))
    parser.add_argument("--work", type=Path, required=True, help="folder for the data and the runs")
    parser.add_argument("--recipe", choices=("early_exit", "plain"), default="early_exit")
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--batch", type=int, default=128, help="sequences a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of the last evaluation")
    parser.add_argument("--tiny", action="store_true", help="a toy model on little text, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokenizer", type=Path, help="of prepare: take this tokenizer.json and train none")
    args = parser.parse_args()
    if args.verb == "prepare":
        prepare(args.work, shape(args).vocab, limit_bytes=2_000_000 if args.tiny else None, known=args.tokenizer)
    else:
        train(args)


if __name__ == "__main__":
    main()
