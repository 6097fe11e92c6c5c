"""Views of a Hugging Face model as drafts, in plain PyTorch: exact acceptance at each position.

A draft token is made over keys and values of the full model for everything that is verified, and of the view for what
it drafted itself in this round. `Drafting` does the same for all tokens of an answer at once: pass 1 treats every token
as the first of a round, pass 2 as the second, with the keys and values of pass 1 for the token before it, and so on. So
every token of an answer begins a round, where an engine that decodes it begins one in three or four.

For checkpoints with layers of q, k, v, o, gate, up and down projections and full attention (Llama, Mistral without a
window, Qwen2, Qwen3, SmolLM2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, FittedWeights

FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
SINGLE = ("self_attn.o_proj", "mlp.down_proj")
ATTENTION = "selfspec_drafting"

Kept = dict[int, list[tuple[Tensor, Tensor]]]
"""Keys and values [b, heads, n, d] by layer: the full model's, then those of each draft pass."""


class DraftLinear(nn.Module):
    """A linear layer that multiplies by its copy while its `Drafting` drafts."""

    def __init__(self, linear: nn.Linear, owner: Drafting) -> None:
        super().__init__()
        self.linear, self._owner = linear, [owner]  # in a list: no submodule
        self.copy: Tensor | None = None  # [out, in]

    def forward(self, x: Tensor) -> Tensor:
        if not self._owner[0].position or self.copy is None:
            out: Tensor = self.linear(x)
            return out
        return F.linear(x, self.copy, self.linear.bias)


class Drafting:
    """Wraps the layers of `model`, in place; `teacher` runs it as it is, `draft` as the view that was set.

    position: number of the draft in its speculation step, from 1; 0 for the full model.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
        if set(kinds) != {"full_attention"}:
            raise ValueError(f"layers of kinds {sorted(set(kinds))}: only full attention is known here")
        self.model, self.position, self.skipped = model, 0, frozenset[int]()
        self.kept: Kept = {}
        AttentionInterface.register(ATTENTION, self._attention)
        model.config._attn_implementation = ATTENTION
        self.linears: dict[str, list[DraftLinear]] = {}
        for index, layer in enumerate(model.model.layers):
            for name, parts in [*FUSED.items(), *((name, (name.rpartition(".")[2],)) for name in SINGLE)]:
                inside = getattr(layer, name.partition(".")[0])
                wrapped = [DraftLinear(getattr(inside, part), self) for part in parts]
                for part, linear in zip(parts, wrapped, strict=True):
                    setattr(inside, part, linear)
                self.linears[f"layers.{index}.{name}"] = wrapped
            layer.forward = self._skippable(index, layer.forward)
        model.lm_head = DraftLinear(model.lm_head, self)
        self.linears[LM_HEAD] = [model.lm_head]

    def weight(self, name: str) -> Tensor:
        """The weight of a fused layer, as vLLM has it."""
        return torch.cat([part.linear.weight for part in self.linears[name]])

    def set_view(self, kind: str = "shared", skipped: Sequence[int] = (), fitted: FittedWeights | None = None) -> None:
        """Draft on copies of `kind`, rounded to nearest or as `fitted` has them, without the layers `skipped`."""
        self.skipped = frozenset(skipped)
        weights = DRAFT_WEIGHTS[kind]
        for name, parts in self.linears.items():
            own = self.weight(name).detach()
            stored = fitted is not None and name in fitted.copies
            tensors = (
                fitted.copies[name]
                if fitted is not None and stored
                else weights.quantise(own)
                if weights.copies
                else None
            )
            copy = (
                None
                if tensors is None
                else weights.dequantise({k: t.to(own.device) for k, t in tensors.items()}, own.dtype)
            )
            sizes = [len(part.linear.weight) for part in parts]
            for number, part in enumerate(parts):
                part.copy = None if copy is None else copy.split(sizes)[number]

    def teacher(self, ids: Tensor) -> Tensor:
        """Logits [b, n, V] of the full model; its keys and values are kept for the drafts."""
        self.kept, self.position = {}, 0
        with torch.no_grad():
            logits: Tensor = self.model(ids, use_cache=False).logits
        return logits

    def draft(self, ids: Tensor, position: int, first: int = 0) -> Tensor:
        """Logits [b, n - first, V] of the view, every token from `first` on being number `position` of its round.

        Call it after `teacher` with the same ids, position after position.
        """
        self.position = position
        places = torch.arange(first, ids.shape[1], device=ids.device).unsqueeze(0)
        try:
            logits: Tensor = self.model(ids[:, first:], position_ids=places, use_cache=False).logits
        finally:
            self.position = 0
        return logits

    def _skippable(self, index: int, forward: Any) -> Any:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.position and index in self.skipped:
                return hidden_states
            return forward(hidden_states, *args, **kwargs)

        return run

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """query, key, value: [b, heads, n, d], of the last n tokens. Right padding is harmless: attention is causal."""
        groups, index, length = query.shape[1] // key.shape[1], module.layer_idx, query.shape[2]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if not self.position:
            self.kept[index] = [(key, value)]
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        kept = self.kept[index]
        full_key, full_value = kept[0]
        # Token i sees what was drafted i - d, d below the position, by the pass in which that was drafted.
        recent = [(key, value), *(kept[self.position - d] for d in range(1, self.position))]
        scores = query @ full_key.transpose(2, 3) * scaling  # [b, heads, length, whole]
        before = full_key.shape[2] - length  # tokens that are not drafted from
        causal = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril(before)
        scores = scores.masked_fill(~causal, -torch.inf)
        at = torch.arange(length, device=query.device)
        for d, (own, _) in enumerate(recent[:length]):
            drafted = (query[:, :, d:] * own[:, :, : length - d]).sum(-1) * scaling
            scores[..., at[d:], before + at[: length - d]] = drafted
        shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        # The first of the last tokens was not drafted itself: what is before it, only the full model has seen.
        older = shares.tril(before - len(recent))
        older[..., :before] = shares[..., :before]
        out = older @ full_value
        for d, (_, own) in enumerate(recent[:length]):
            band = shares[..., at[d:], before + at[: length - d]].unsqueeze(-1) * own[:, :, : length - d]
            out = out + F.pad(band, (0, 0, d, 0))
        if len(kept) == self.position:
            kept.append((key.detach(), value.detach()))
        return out.transpose(1, 2).contiguous(), None


@dataclass
class Answer:
    """One answer of the model, and what the full model made of it: logits of each token's successor, and its cache."""

    ids: Tensor  # [n], prompt and answer
    first: int  # of the answer
    full: Tensor  # [n - first, V], log-probabilities at the temperature (at 1 where that is 0)
    kept: Kept

    @classmethod
    def of(cls, drafting: Drafting, ids: Tensor, first: int, temperature: float) -> Answer:
        """Runs the full model over it."""
        with torch.no_grad():
            logits = drafting.teacher(ids.unsqueeze(0))[0, first - 1 : -1].float()
            return cls(ids, first, _log_probabilities(logits, temperature), drafting.kept)


def accepted(drafting: Drafting, answer: Answer, k: int, temperature: float = 0.0) -> dict[str, Tensor]:
    """For every round that may begin in an answer, the probability that drafts 1..j are accepted: [rounds, k].

    "most likely": drafts are the view's most likely tokens, as vLLM makes them by default. One is accepted where the
    model's own choice is the same, so at any temperature its acceptance is how often it is the token that the model
    drew. "drawn", above temperature 0: drafts are drawn at the temperature too, and the model's token x is then drafted
    and kept with probability min(1, q(x) / p(x)).
    """
    ids, start = answer.ids, answer.first - 1
    following = ids[answer.first :]
    steps: dict[str, list[Tensor]] = {"most likely": []}
    if temperature:
        steps["drawn"] = []
    drafting.kept = {index: kept[:1] for index, kept in answer.kept.items()}
    with torch.no_grad():
        for position in range(1, k + 1):
            logits = drafting.draft(ids.unsqueeze(0), position, start)[0, :-1].float()
            steps["most likely"].append((logits.argmax(-1) == following).float())
            if temperature:
                ours, theirs = (
                    each.gather(1, following.unsqueeze(1))[:, 0]
                    for each in (_log_probabilities(logits, temperature), answer.full)
                )
                steps["drawn"].append((ours - theirs).exp().clamp(max=1))
    count = len(following) - k + 1
    return {
        name: torch.stack([made[j][j : j + count] for j in range(k)], dim=1).cumprod(1) for name, made in steps.items()
    }


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (logits / (temperature or 1.0)).log_softmax(-1)


def load(folder: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or a Hugging Face id, gradients off."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(folder)


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], length: int, temperature: float, seed: int
) -> list[tuple[list[int], int]]:
    """(prompt and answer, first token of the answer) for each prompt: the model's own, cut after its end of text.

    Call it before `Drafting` wraps the model.
    """
    torch.manual_seed(seed)
    longest, fill = max(map(len, prompts)), tokenizer.pad_token_id or 0
    ids = torch.tensor([[fill] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=length, pad_token_id=fill, repetition_penalty=1.0, **sampling
        )
    found = []
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for prompt, row in zip(prompts, made.tolist(), strict=True):
        new = row[longest:]
        stop = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
        found.append((prompt + new[:stop], len(prompt)))
    return found


def chat_prompts(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Return the prompts of `workload=chat`, as token ids."""
    from selfspec_cli.texts import chat

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return chat.asked("chat", count, seed, ask, 0)


def library_prompts(tokenizer: Any, count: int, seed: int, length: int = 32) -> list[list[int]]:
    """The prompts of `workload=headline`: windows of held-out library code."""
    from selfspec_cli.texts import library

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    return library.token_windows(encode, library.held_out_text(), length, count, seed)
