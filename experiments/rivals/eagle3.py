"""Train an EAGLE-3 head for a model with the package `speculators`, to compare with drafts of the model's own layers.

    python experiments/rivals/eagle3.py --model experiments/reference_model/model --out rivals/eagle3 --device cuda
    selfspec bench method=vllm speculative=eagle3 speculative.model=./rivals/eagle3

One decoder layer reads three hidden states of the model and the next token's embedding, and drafts over the full
vocabulary with the model's own lm_head (both stay as they are). It is trained on what the model itself writes, sampled
at temperature 1: after windows of this Python's standard library, or with --chat also after chat questions and coding
tasks that the measurements do not ask. Nothing of what is measured is trained on. The loss is speculators' own (KL
divergence to the model, each step after the drafts of the steps before it).

Needs `speculators` 0.9 and transformers, in an environment of their own if need be (docs/measurements.md); no network.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

KINDS = ("llama", "qwen3")  # of layers that speculators has
SEED = 2  # of the code's windows, and of what is drawn
UNASKED = (("chat", 32), ("coding", 16))  # questions that the measurements do not ask: all from seed 1 on
Batch = dict[str, Tensor]


def main() -> None:
    """Write texts, train until the time is up, save."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen = _arguments()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, several times as many steps a minute
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=getattr(torch, chosen.dtype)).to(chosen.device)
    model, tokenizer = model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(chosen.model)
    texts = _texts(chosen, model, tokenizer)
    held, trained = texts[: max(len(texts) // 20, 1)], texts[max(len(texts) // 20, 1) :]
    if not trained:
        raise SystemExit(f"--texts {chosen.texts}: too few to train on and to hold some out; at least 2")
    head = _head(chosen).to(chosen.device, getattr(torch, chosen.dtype))
    size = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    print(
        f"{len(trained)} texts of {chosen.length} tokens after {time.monotonic() - began:.0f} s; {size:,} parameters "
        "to train",
        flush=True,
    )
    states = _States(model, head.target_layer_ids)
    train(chosen, head, states, trained)
    head.eval()
    with torch.no_grad():
        parts = [
            head(**states.batch(held[at : at + chosen.batch]), **_how(chosen))[2]
            for at in range(0, len(held), chosen.batch)
        ]
    print(f"held out: {_accepted(parts, chosen.steps_ahead)}", flush=True)
    head.save_pretrained(chosen.out)
    print(f"saved to {chosen.out} after {time.monotonic() - began:.0f} s")


def train(chosen: argparse.Namespace, head: Any, states: _States, texts: list[list[int]]) -> None:
    """AdamW until --minutes or --steps are over; the rate warms up over 5 % of that and falls as a cosine does."""
    weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=chosen.rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw, start, step = random.Random(SEED), time.monotonic(), 0
    head.train()
    while True:
        share = max((time.monotonic() - start) / (60 * chosen.minutes), step / chosen.steps if chosen.steps else 0.0)
        if share >= 1:
            return
        for group in optimiser.param_groups:
            group["lr"] = chosen.rate * min(share / 0.05 + 1e-3, 1.0) * 0.5 * (1 + math.cos(math.pi * share))
        batch = states.batch(draw.sample(texts, min(chosen.batch, len(texts))))
        _, loss, accuracy = head(**batch, **_how(chosen))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % chosen.every == 0:
            print(f"step {step} loss {loss.item():.3f} {_accepted([accuracy], chosen.steps_ahead)}", flush=True)
        step += 1


class _States:
    """The target's hidden states of texts, as a head is trained on them."""

    def __init__(self, model: Any, layers: list[int]) -> None:
        self.model, self.layers, self._last = model, layers, torch.empty(0)
        # What the final norm is given: transformers' own list of hidden states ends after that norm.
        model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _: Any, args: tuple[Tensor, ...]) -> None:
        self._last = args[0]

    def batch(self, texts: list[list[int]]) -> Batch:
        """Join texts of one length into one row, in which the state of a token is paired with the next token."""
        ids = torch.tensor(texts, device=self.model.device)  # [b, n]
        with torch.no_grad():
            found = self.model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        states = torch.cat([found[layer] for layer in self.layers], -1)[:, :-1]  # before these layers, as in vLLM
        count, length = ids.shape[0], ids.shape[1] - 1
        documents = torch.arange(count, device=ids.device).repeat_interleave(length)
        places = torch.arange(1, length + 1, device=ids.device).repeat(count)
        return {
            "hidden_states": states.flatten(0, 1).unsqueeze(0),
            "input_ids": ids[:, 1:].flatten().unsqueeze(0),
            "verifier_last_hidden_states": self._last[:, 1:].flatten(0, 1).unsqueeze(0),
            "document_ids": documents.unsqueeze(0),
            "position_ids": places.unsqueeze(0),
            # The last tokens of a text would be judged by the first of the next one.
            "loss_mask": (places <= length - 4).unsqueeze(0),
        }


def _how(chosen: argparse.Namespace) -> dict[str, Any]:
    """How many draft steps a loss looks at, and the loss in plain PyTorch: speculators' own kernel needs a GPU."""
    from speculators.losses import resolve_loss_config

    return {"ttt_steps": chosen.steps_ahead, "loss_config": resolve_loss_config("kl_div", "eager")}


def layer_of(config: Any) -> Any:
    """The config of a head's only layer: the model's own kind, and Llama's where speculators has none of that kind."""
    from transformers import LlamaConfig

    if config.model_type not in KINDS:
        names = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_act",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_parameters",
        )
        if missing := [name for name in names if not hasattr(config, name)]:
            raise SystemExit(
                f"a {config.model_type} has no {', '.join(missing)}; allowed: models with layers like Llama's"
            )
        given = {name: getattr(config, name) for name in names}
        config = LlamaConfig(**given, head_dim=getattr(config, "head_dim", None))
    config.num_hidden_layers = 1
    return config


def _head(chosen: argparse.Namespace) -> Any:
    """An untrained head of one layer, with the model's embedding and lm_head."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    torch.manual_seed(SEED)
    config = layer_of(AutoConfig.from_pretrained(chosen.model))
    return Eagle3DraftModel.from_training_args(
        verifier_config=config,
        verifier_name_or_path=str(Path(chosen.model).absolute()),
        draft_vocab_size=config.vocab_size,
        norm_before_residual=True,
        ttt_steps=chosen.steps_ahead,
        draft_attn_impl="eager",
    )


def _texts(chosen: argparse.Namespace, model: Any, tokenizer: Any) -> list[list[int]]:
    """--texts texts of --length tokens, each begun by somebody else and written by the model."""
    from selfspec_cli.texts import library, questions

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    made: list[list[int]] = []
    for part in range(64 * chosen.texts):
        if len(made) >= chosen.texts:
            break
        if chosen.chat and part % 2:
            asked = [ids for kind, count in UNASKED for ids in questions.asked(kind, count, 1, ask, 0)]
            prompts = asked * (chosen.at_once // len(asked) or 1)
        else:
            prompts = library.token_windows(encode, library.fitting_text(), 32, chosen.at_once, SEED + part)
        wanted = chosen.length - min(map(len, prompts))
        written = _written(model, tokenizer, prompts, wanted, SEED + part)
        made += [ids[: chosen.length] for ids in written if len(ids) >= chosen.length]
    random.Random(SEED).shuffle(made)  # or none of the answers to questions would be among those held out
    return made[: chosen.texts]


def _written(model: Any, tokenizer: Any, prompts: list[list[int]], length: int, seed: int) -> list[list[int]]:
    """Prompts with the model's own continuations of at most `length` tokens, drawn, up to their end of text."""
    torch.manual_seed(seed)
    longest, fill = max(map(len, prompts)), tokenizer.pad_token_id or 0
    ids = torch.tensor([[fill] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    with torch.no_grad():
        rows = model.generate(ids, attention_mask=mask, max_new_tokens=length, pad_token_id=fill, **drawn).tolist()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    found = []
    for prompt, row in zip(prompts, rows, strict=True):
        new = row[longest:]
        stop = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
        found.append(prompt + new[:stop])
    return found


def _accepted(parts: list[dict[str, Tensor]], ahead: int) -> str:
    """Share of the model's most likely tokens that each draft step finds where those before it did."""

    def share(at: int) -> float:
        right, asked = (sum(float(part[f"cond_acc_{at}_{name}"]) for part in parts) for name in ("sum", "total"))
        return right / asked if asked else 0.0

    return "right at " + ", ".join(f"{at + 1}: {share(at):.3f}" for at in range(ahead))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a decoder like Llama's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training; writing the texts comes before")
    parser.add_argument("--steps", type=int, default=0, help="maximum number of steps; 0: as many as the minutes allow")
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--length", type=int, default=160, help="tokens of a text, what began it included")
    parser.add_argument("--at-once", type=int, default=256, help="texts that are written together")
    parser.add_argument("--batch", type=int, default=16, help="texts a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps-ahead", type=int, default=4, help="draft steps that the loss looks at")
    parser.add_argument("--chat", action="store_true", help="half of the texts are answers to questions")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of progress")
    return parser.parse_args()


if __name__ == "__main__":
    main()
