"""Early-exit self-speculative decoding in plain PyTorch: the whole method on one page.

A decoder says what comes next after all of its L layers. Often its first E layers would have said the same. A round is

    draft     the first E layers guess up to k tokens, one after another;
    gate      after each guess, a look at the draft's probabilities: is it worth guessing on?
    verify    one pass of all L layers over the newest token and the guesses: a prefix of them is accepted, and the
              token that follows is the model's own.

On a GPU a verify pass takes about as long as one plain step, so each accepted guess saves most of a step. The output is
that of plain decoding: the same tokens at temperature 0, the same distribution above it.

`propose` and `verify` are the method, `generate` repeats them, and `Decoder` is a small Llama to run them on. The rest
of selfspec does the same inside vLLM, in batches and on GPUs, and its engine tests compare vLLM with this file.

    python -m selfspec_cli.early_exit.reference"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Model = Callable[[Sequence[int], Tensor, int], Tensor]
"""(n tokens, cache, position of the first) -> logits [n, V] of what follows each. It writes the tokens' keys and values
into the cache at their positions, over what was there, and attends to all positions before."""

Gate = Callable[[Tensor], bool]
"""Logits [V] of a draft step -> whether to draft another token."""

Draw = Callable[[Tensor], int]
"""Probabilities [n] -> an index. All chance is in here."""


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """[..., V]; at temperature 0 all on the token with the greatest logit."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


def at_random(p: Tensor) -> int:
    """A draw by PyTorch's generator."""
    return int(torch.multinomial(p, 1))


def always(logits: Tensor) -> bool:
    """The gate `none`."""
    return True


def confident(threshold: float) -> Gate:
    """The gate `maxp`: go on while the likeliest token has at least this probability. gates/ has the others."""
    return lambda logits: float(logits.softmax(-1).max()) >= threshold


def propose(
    draft: Model, cache: Tensor, text: Sequence[int], k: int, gate: Gate, temperature: float, draw: Draw
) -> tuple[list[int], list[Tensor]]:
    """Draft up to k tokens after `text`; also the probabilities [V] that each was drawn from. Nothing is prefilled: the
    cache holds the first layers' keys and values for every token of `text` but the newest."""
    guesses: list[int] = []
    drawn_from: list[Tensor] = []
    while len(guesses) < k:
        newest = guesses[-1] if guesses else text[-1]
        logits = draft([newest], cache, len(text) - 1 + len(guesses))[0]
        drawn_from.append(probabilities(logits, temperature))
        guesses.append(draw(drawn_from[-1]))
        if not gate(logits):  # the token just drafted is proposed either way
            break
    return guesses, drawn_from


def verify(
    full: Model,
    cache: Tensor,
    text: Sequence[int],
    guesses: Sequence[int],
    drawn_from: Sequence[Tensor],
    temperature: float,
    draw: Draw,
) -> tuple[int, int]:
    """How many guesses are accepted, and the token that follows them (Leviathan et al., arXiv:2211.17192).
    A guess x drawn from q is accepted with probability min(1, p(x) / q(x)); after a rejection the next token is drawn
    from the part of p that q does not cover, max(p - q, 0). Together that is a draw from p. At temperature 0 both
    distributions are all on one token: the guess is accepted if it is the model's, and replaced by it otherwise."""
    logits = full([text[-1], *guesses], cache, len(text) - 1)  # overwrites the keys and values of the drafts
    wanted = probabilities(logits, temperature)
    for place, (guess, p, q) in enumerate(zip(guesses, wanted, drawn_from, strict=False)):
        accept = (p[guess] / q[guess]).clamp(max=1)
        if not draw(torch.stack([1 - accept, accept])):
            uncovered = (p - q).clamp(min=0)
            return place, draw(uncovered / uncovered.sum())
    return len(guesses), draw(wanted[-1])


@dataclass(frozen=True)
class Round:
    """Tokens drafted and accepted in one round, which adds accepted + 1 tokens to the text."""

    drafted: int
    accepted: int


def generate(
    full: Model,
    draft: Model,
    cache: Tensor,
    prompt: Sequence[int],
    length: int,
    k: int,
    gate: Gate = always,
    temperature: float = 0.0,
    draft_temperature: float | None = None,
    draw: Draw = at_random,
) -> tuple[list[int], list[Round]]:
    """`length` tokens after `prompt`, and the rounds that made them; the last round may go beyond the length.
    full: all layers. draft: anything cheaper that keeps the same cache, as `partial(decoder, layers=E)`.
    draft_temperature: of the drafts alone, if it is another; it changes how many are accepted, and no output."""
    drafts_at = temperature if draft_temperature is None else draft_temperature
    text = [*prompt, draw(probabilities(full(prompt, cache, 0)[-1], temperature))]
    rounds = []
    while len(text) < len(prompt) + length:
        guesses, drawn_from = propose(draft, cache, text, k, gate, drafts_at, draw)
        accepted, following = verify(full, cache, text, guesses, drawn_from, temperature, draw)
        text += [*guesses[:accepted], following]
        rounds.append(Round(len(guesses), accepted))
    return text[len(prompt) : len(prompt) + length], rounds


# ---- a model to run it on -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A Llama: weights by their names in a checkpoint of transformers; `eps` of its norms, `theta` of its rotations."""

    weights: Mapping[str, Tensor]
    depth: int
    head_dim: int
    eps: float = 1e-6
    theta: float = 10000.0

    def new_cache(self, positions: int) -> Tensor:
        """Keys and values, [layers, 2, heads, positions, head_dim]."""
        heads = len(self.weights["model.layers.0.self_attn.k_proj.weight"]) // self.head_dim
        return torch.zeros(self.depth, 2, heads, positions, self.head_dim)

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], cache: Tensor, start: int, layers: int | None = None) -> Tensor:
        """A `Model`. layers: number of layers before the final norm and the head; fewer than all are the early exit."""
        x = self.weights["model.embed_tokens.weight"][list(tokens)]
        for number in range(self.depth if layers is None else layers):
            layer = f"model.layers.{number}."
            x = x + self._attention(
                f"{layer}self_attn.", self._norm(x, f"{layer}input_layernorm"), cache[number], start
            )
            x = x + self._mlp(f"{layer}mlp.", self._norm(x, f"{layer}post_attention_layernorm"))
        return self._linear("lm_head", self._norm(x, "model.norm"))

    def _attention(self, name: str, x: Tensor, cache: Tensor, start: int) -> Tensor:
        end, at = start + len(x), torch.arange(start, start + len(x))
        q, k, v = (
            self._linear(f"{name}{one}_proj", x).unflatten(1, (-1, self.head_dim)).transpose(0, 1) for one in "qkv"
        )
        cache[0, :, start:end], cache[1, :, start:end] = self._rotated(k, at), v
        visible = torch.arange(end) <= at[:, None]
        keys, values = cache[:, None, :, :end]
        out = F.scaled_dot_product_attention(self._rotated(q, at)[None], keys, values, visible, enable_gqa=True)
        return self._linear(f"{name}o_proj", out[0].transpose(0, 1).flatten(1))

    def _rotated(self, x: Tensor, at: Tensor) -> Tensor:
        angle = at[:, None] * self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        return self._linear(
            f"{name}down_proj", F.silu(self._linear(f"{name}gate_proj", x)) * self._linear(f"{name}up_proj", x)
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])


def random_decoder(depth: int = 8, hidden: int = 64, vocab: int = 256, decay: float = 0.6) -> Decoder:
    """Random weights. Each layer adds `decay` times what the one before it adds, so early exits are often right."""

    def weight(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * scale

    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens": weight(vocab, hidden, hidden**0.5),
        "lm_head": weight(vocab, hidden, 3.0),
        "model.norm": torch.ones(hidden),
    }
    for layer in range(depth):
        name, scale = f"model.layers.{layer}.", 4 * decay**layer
        weights |= {f"{name}self_attn.{one}_proj": weight(hidden // (2 if one in "kv" else 1), hidden) for one in "qkv"}
        weights |= {f"{name}mlp.{one}_proj": weight(2 * hidden, hidden) for one in ("gate", "up")}
        weights |= {f"{name}{one}_layernorm": torch.ones(hidden) for one in ("input", "post_attention")}
        weights[f"{name}self_attn.o_proj"] = weight(hidden, hidden, scale)
        weights[f"{name}mlp.down_proj"] = weight(hidden, 2 * hidden, scale)
    return Decoder({f"{name}.weight": one for name, one in weights.items()}, depth, head_dim=hidden // 2)


def main() -> None:
    """Draft with more and more layers, with and without a gate, and compare with decoding without drafts or cache."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products this small are slower on several
    model, prompt, length, k = random_decoder(), [5, 17, 3], 150, 4
    plain = [*prompt]
    for _ in range(length):
        plain.append(int(model(plain, model.new_cache(len(plain)), 0)[-1].argmax()))
    print(
        f"{model.depth} layers of random weights; {length} tokens; at most k = {k} drafts a round.\n"
        "Layers a token: layers run one after another, where a verify pass takes as long as a plain step.\n\n"
        "temperature  E  gate      drafted  accepted  tokens a round  layers a token  output"
    )
    gates = {"none": always, "maxp 0.3": confident(0.3)}
    cases = [(0.0, layers, name) for layers in (1, 2, 4, 6) for name in gates] + [(1.0, 4, name) for name in gates]
    for temperature, layers, name in cases:
        cache = model.new_cache(len(prompt) + length + 2 * k)
        draft = partial(model, layers=layers)
        text, rounds = generate(model, draft, cache, prompt, length, k, gates[name], temperature)
        drafted, accepted = sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)
        yielded = 1 + accepted / len(rounds)
        depth = (model.depth + layers * drafted / len(rounds)) / yielded
        output = "sampled" if temperature else "plain decoding's" if text == plain[len(prompt) :] else "WRONG"
        print(
            f"{temperature:11}  {layers}  {name:8}  {drafted:7}  {accepted / drafted:8.0%}  {yielded:14.2f}"
            f"  {depth:14.2f}  {output}"
        )
    print(f"{'':11}  {model.depth}  (plain decoding){'':14}  {1:14.2f}  {model.depth:14.2f}")


if __name__ == "__main__":
    main()
