"""Which view drafts best at which length of the context? Plain PyTorch for acceptance, bytes for the costs, no engine.

    python experiments/views/by_context.py --model smollm2 --contexts 512,2048 --views "int8;int4;int4 256" --out FILE
    python experiments/views/by_context.py --model qwen2.5-coder-1.5b --device cuda --contexts 512,4096,16384 \
        --views "int8;int4;int4 512;3-27" --answers 4 --out FILE

A view is KIND[@LAYERS][ WINDOW], as acceptance.py has it, with the last tokens of the context that its drafts attend
to.
Prompts of each length are windows of held-out library code, which the model continues greedily by --length tokens;
every one of them begins a round (drafting.py). From the acceptance at each place follow the tokens of a round of each
length, and from the bytes that a step reads (weights and keys and values, at one request) its cost: `speedup` is that
of the best length. So the order of views is what the cost model says of a GPU whose memory is the limit, and no time
is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from acceptance import view_of
from drafting import Answer, Drafting, accepted, answers, library_prompts, load

from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.scripts import among, numbers

SIXTEEN_BITS = 2  # bytes of a number of the target and of its KV cache
BITS = {"int4": 4.5, "int8": 8.25}  # of a number of a copy, with the scales of its groups


def costs_of(model: Any, kind: str, skipped: int, context: int, window: int | None) -> Costs:
    """What a plain step, a verify pass and a draft step of a view read, in bytes."""
    config = model.config
    layers = config.num_hidden_layers
    of_layers = sum(one.numel() for one in model.model.layers.parameters()) * SIXTEEN_BITS
    head = model.lm_head.linear.weight.numel() * SIXTEEN_BITS
    per_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = layers * 2 * config.num_key_value_heads * per_head * SIXTEEN_BITS
    share, smaller = (layers - skipped) / layers, BITS.get(kind, 16) / 16
    draft = (of_layers * share + head) * smaller + token * share * min(context, window or context)
    full = of_layers + head + token * context
    return Costs(plain=full, draft=draft, verify=full)


def row(model: Any, word: str, context: int, found: torch.Tensor, answered: int) -> dict[str, Any]:
    """What one view reached at one length. found: [rounds, k], whether drafts 1..j of a round were accepted."""
    kind, skipped, window = parsed(word)
    alive = found.double().mean(0).tolist()
    tokens = {k: 1 + sum(alive[:k]) for k in range(len(alive) + 1)}
    best, speedup = costs_of(model, kind, len(skipped), context, window).best_k(tokens)
    given = zip(alive, [1.0, *alive[:-1]], strict=True)
    return {"view": word, "context": context, "answers": answered, "rounds": len(found),
            "given_before": [round(one / other, 4) if other else None for one, other in given],
            "tokens": round(tokens[best], 3), "k": best, "speedup": round(speedup, 3)}  # fmt: skip


def parsed(word: str) -> tuple[str, tuple[int, ...], int | None]:
    """(kind of copies, layers left out, window) of a view."""
    view, _, window = word.partition(" ")
    kind, skipped, _ = view_of(view, tuple(DRAFT_WEIGHTS))
    return kind, skipped, int(window) if window else None


def views(text: str) -> list[str]:
    """A type for argparse: views with ';' between them."""
    words = [word.strip() for word in text.split(";")]
    for word in words:
        among(DRAFT_WEIGHTS, "kind of copies")(parsed(word)[0])
    return words


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    options.add_argument("--contexts", type=numbers, default="128,512,960")
    options.add_argument("--views", type=views, required=True, help="by ';'")
    options.add_argument("--answers", type=int, default=12, help="of each length")
    options.add_argument("--length", type=int, default=32, help="tokens of an answer")
    options.add_argument("--k", type=int, default=8, help="longest draft")
    options.add_argument("--device", default="cpu", help="cuda: in bfloat16")
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    model, tokenizer = load(chosen.model, chosen.device, torch.float32 if chosen.device == "cpu" else torch.bfloat16)
    texts = {at: [answers(model, tokenizer, [prompt], chosen.length, 0.0, 0)[0]
                  for prompt in library_prompts(tokenizer, chosen.answers, 0, at)]
             for at in chosen.contexts}  # fmt: skip
    drafting, rows = Drafting(model), []
    for context, made in texts.items():
        long = [Answer.of(drafting, torch.tensor(ids, device=chosen.device), first, 0.0)
                for ids, first in made if len(ids) - first > chosen.k]  # fmt: skip
        found: dict[str, list[torch.Tensor]] = {}
        for word in chosen.views:
            kind, skipped, drafting.window = parsed(word)
            drafting.set_view(kind, skipped)
            found[word] = [accepted(drafting, answer, chosen.k)["most likely"].cpu() for answer in long]
        rows += [row(model, word, context, torch.cat(parts), len(parts)) for word, parts in found.items()]
        print(*rows[-len(found) :], sep="\n", flush=True)
        document = {"model": Path(chosen.model).name, "device": chosen.device, "length": chosen.length, "rows": rows}
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
