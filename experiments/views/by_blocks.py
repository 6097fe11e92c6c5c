"""Which blocks of a context should drafts attend to? Plain PyTorch, acceptance of the model's own answers, no engine.

    python experiments/views/by_blocks.py --model qwen2.5-coder-0.5b --context 4096 --k 12 \
        --views "whole;window:512;blocks:512:18;blocks:512:all;blocks:512:each" --out FILE

Prompts are those of `workload=files`. Every token of an answer begins a round (drafting.py); a round is made on copies
of all layers (--weights) after the full model's keys and values. A view is one of

    whole                  all of the context
    window:TOKENS          the first block of 16 tokens and the blocks of the last TOKENS
    blocks:TOKENS:SOURCE   the first block, the blocks of the last TOKENS / 4, and of those between the ones with the
                           greatest attention, TOKENS together. SOURCE: one selection for all layers by the attention of
                           layer NUMBER or of "all" layers, its heads added up; "each": every layer by its own; "mean"
                           and "range": of all layers, by the mean key of a block or by the least and greatest number of
                           each place (Quest, arXiv:2406.10774); "keys": of all layers, with the newest key, made
                           standard, in place of a query. Behind it @LAG: the query of the token that stands LAG places
                           before the one that begins the round; without it 1, the newest that has keys and values.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from drafting import Answer, Drafting, accepted, answers, chat_prompts, load
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.scripts import among

SIZE = 16  # tokens of a block
FARTHEST = 32  # lag


@dataclass
class Asked:
    """An answer, and what its last tokens attend to: rows are the tokens from `FARTHEST` before the answer on."""

    answer: Answer
    queries: dict[int, Tensor]  # [heads, n, d] by layer
    found: dict[str, Tensor] = field(default_factory=dict)  # attention to blocks [rows, blocks], by source and layer

    @property
    def start(self) -> int:
        """The token with which the first round begins: the last one of the prompt."""
        return self.answer.first - 1

    def attention(self, source: str, layer: int) -> Tensor:
        """To each block by each row, heads added up."""
        name = f"{source} {layer}"
        if name not in self.found:
            begin, whole = self.start - FARTHEST, len(self.answer.ids)
            query, key = self.queries[layer][:, begin:].float(), self.answer.kept[layer][0][0][0].float()
            if source == "keys":
                key = (key - key.mean(1, keepdim=True)) / key.std(1, keepdim=True)
                query = key[:, begin:]
            scores = KINDS.get(source, every_key)(query, key) * key.shape[-1] ** -0.5
            at, step = torch.arange(scores.shape[-1]), 1 if scores.shape[-1] == whole else SIZE
            scores = scores.masked_fill(at * step > torch.arange(begin, whole).unsqueeze(1), -torch.inf)
            shares = scores.softmax(-1).sum(0)
            self.found[name] = shares if step > 1 else in_blocks(shares).sum(-1)
        return self.found[name]


def in_blocks(x: Tensor) -> Tensor:
    """[..., tokens] -> [..., blocks, SIZE], with zeros at the end."""
    return F.pad(x, (0, -x.shape[-1] % SIZE)).unflatten(-1, (-1, SIZE))


def every_key(query: Tensor, key: Tensor) -> Tensor:
    """Scores of all tokens."""
    return query @ key.transpose(1, 2)


def mean_key(query: Tensor, key: Tensor) -> Tensor:
    """Scores of blocks by their mean keys. The last, begun block is attended to anyway."""
    return query @ in_blocks(key.transpose(1, 2)).mean(-1)


def range_of_keys(query: Tensor, key: Tensor) -> Tensor:
    """The greatest score that any key between the least and the greatest numbers of a block could have."""
    blocks = in_blocks(key.transpose(1, 2))  # [heads, d, blocks, SIZE]
    return query.clamp_min(0) @ blocks.amax(-1) + query.clamp_max(0) @ blocks.amin(-1)


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean_key, "range": range_of_keys}


def attended(asked: Asked, view: str, layers: int) -> dict[int, Tensor]:
    """By layer, which tokens the drafts of each round attend to: bool [rounds, tokens]. Empty: all of them."""
    kind, *words = view.split(":")
    if kind == "whole":
        return {}
    tokens, source = int(words[0]), words[1] if kind == "blocks" else ""
    source, _, lag = source.partition("@")
    rounds = torch.arange(FARTHEST, FARTHEST + len(asked.answer.ids) - asked.start) - int(lag or 1)

    def chosen(weights: Tensor) -> Tensor:
        return selection(weights[rounds], asked.start, len(asked.answer.ids), tokens, kind == "window")

    if not source:
        return dict.fromkeys(range(layers), chosen(asked.attention("all", 0)))
    if source == "each":
        return {layer: chosen(asked.attention("all", layer)) for layer in range(layers)}
    taken = [int(source)] if source.isdecimal() else list(range(layers))
    by = source if source in ("mean", "range", "keys") else "all"
    weights = torch.stack([asked.attention(by, layer) for layer in taken]).sum(0)
    return dict.fromkeys(range(layers), chosen(weights))


def selection(weights: Tensor, start: int, whole: int, tokens: int, window: bool) -> Tensor:
    """bool [rounds, whole] of the first block, those of the last tokens, and the blocks with the greatest weights."""
    last = tokens if window else tokens // 4
    newest = start + torch.arange(len(weights)).unsqueeze(1)
    at = torch.arange(weights.shape[1])
    kept = (at == 0) | (at >= (newest + 1 - last) // SIZE)
    top = weights.masked_fill(kept, -torch.inf).topk(min((tokens - last) // SIZE, len(at)), 1)
    kept = kept.scatter(1, top.indices, top.values > -torch.inf) | kept
    return kept.repeat_interleave(SIZE, 1)[:, :whole]


def views(text: str) -> list[str]:
    """A type for argparse: views with ';' between them."""
    words = [word.strip() for word in text.split(";")]
    for word in words:
        kind, *rest = word.split(":")
        among(("whole", "window", "blocks"), "view")(kind)
        if len(rest) != {"whole": 0, "window": 1, "blocks": 2}[kind] or not all(one.isdecimal() for one in rest[:1]):
            raise argparse.ArgumentTypeError(f"{word!r}: write whole, window:TOKENS or blocks:TOKENS:SOURCE")
        source, _, lag = rest[1].partition("@") if len(rest) > 1 else ("all", "", "")
        if not source.isdecimal():
            among(("all", "each", "keys", *KINDS), "source")(source)
        if lag and not (lag.isdecimal() and int(lag) <= FARTHEST):
            raise argparse.ArgumentTypeError(f"{word!r}: a lag of {lag}; allowed: 0 to {FARTHEST}")
    return words


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="a folder or a Hugging Face id")
    options.add_argument("--context", type=int, default=4096)
    options.add_argument("--views", type=views, required=True, help="by ';'")
    options.add_argument("--weights", type=among(DRAFT_WEIGHTS, "kind of copies"), default="int4")
    options.add_argument("--answers", type=int, default=8)
    options.add_argument("--length", type=int, default=88, help="tokens of an answer")
    options.add_argument("--k", type=int, default=8, help="longest draft")
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    model, tokenizer = load(chosen.model, "cpu", torch.bfloat16)
    prompts = chat_prompts(tokenizer, chosen.answers, 0, "files", chosen.context)
    made = [answers(model, tokenizer, [prompt], chosen.length, 0.0, 0)[0] for prompt in prompts]
    drafting = Drafting(model)
    drafting.set_view(chosen.weights)
    asked = []
    for ids, first in made:
        if len(ids) - first > chosen.k:
            answer = Answer.of(drafting, torch.tensor(ids), first, 0.0)
            asked.append(Asked(answer, {layer: query[0] for layer, query in drafting.queries.items()}))
    rows: list[dict[str, Any]] = []
    for view in chosen.views:
        found = []
        for one in asked:
            drafting.attended = attended(one, view, model.config.num_hidden_layers)
            found.append(accepted(drafting, one.answer, chosen.k)["most likely"])
        alive = torch.cat(found).double().mean(0)
        tokens = {k: round(1 + float(alive[:k].sum()), 3) for k in sorted({4, 8, chosen.k}) if k <= chosen.k}
        rows.append({"view": view, "rounds": sum(map(len, found)), "tokens": tokens})
        print(rows[-1], flush=True)
        document = {"model": Path(chosen.model).name, "context": chosen.context, "weights": chosen.weights,
                    "length": chosen.length, "rows": rows}  # fmt: skip
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
