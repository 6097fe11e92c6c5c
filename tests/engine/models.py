"""Tiny random-weight models whose early exits are sometimes right: what every engine test runs on.

Random weights alone make early exits useless (every layer changes everything) and greedy output degenerate (tied
embeddings repeat the last token). So each layer's contribution to the residual stream is measured and rescaled to a
geometric series: the first layer outweighs the embedding, and each later one matters less, so that the agreement of
exit E with the last layer grows with E and is neither 0 nor 1. Weights are fp32 with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS = 8
VOCAB = 256
MAX_LEN = 512
FIRST, DECAY = 4.0, 0.72  # std of the first layer's contribution (the embedding's is 1), and of each next relative to it
SHARPNESS = 3.0  # std of the logits: some predictions are sure, some are not, so gates have something to tell apart


@dataclass(frozen=True)
class Tiny:
    """One architecture. config: makes its transformers config. post_norm: its output norms, which hide weight scales."""

    name: str
    config: Callable[[], Any]
    post_norms: tuple[str, ...] = ()


def _shape(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **changes,
    }


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_shape(**changes))


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_shape())


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_shape(sliding_window=48))


def _gemma() -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(**_shape(tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"))


def _gemma2() -> Any:
    from transformers import Gemma2Config

    # Soft-capping of logits and attention, and sliding windows in every other layer, are on by default.
    return Gemma2Config(**_shape(tie_word_embeddings=True, sliding_window=48, query_pre_attn_scalar=32))


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * (LAYERS // 4)
    return Gemma3TextConfig(
        **_shape(tie_word_embeddings=True, sliding_window=48, query_pre_attn_scalar=32, layer_types=kinds)
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeConfig(**_shape(**experts))


_GEMMA_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

ARCHITECTURES = {
    tiny.name: tiny
    for tiny in (
        Tiny("llama", _llama),
        Tiny("llama_small_vocab", lambda: _llama(vocab_size=32)),
        Tiny("qwen3", _qwen3),
        Tiny("mistral", _mistral),
        Tiny("gemma", _gemma),
        Tiny("gemma2", _gemma2, _GEMMA_NORMS),
        Tiny("gemma3", _gemma3, _GEMMA_NORMS),
        Tiny("qwen3_moe", _qwen3_moe),
    )
}


def save_tiny(name: str, folder: Path, seed: int = 0) -> Path:
    """Make the model `name` of ARCHITECTURES and save it to `folder`, as `vllm.LLM` loads it."""
    from transformers import AutoModelForCausalLM

    tiny = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float32).eval()
    _randomise(model)
    _grade(model, tiny.post_norms)
    _sharpen(model)
    model.save_pretrained(folder)
    return folder


def _randomise(model: nn.Module) -> None:
    """Matrices that keep the size of what they map, norms that are not all ones, so that no path is trivially right."""
    for name, weight in model.named_parameters():
        with torch.no_grad():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5)
        if "embed_tokens" in name and not model.config.tie_word_embeddings:
            weight.data.normal_(std=1.0)


@torch.no_grad()
def _grade(model: nn.Module, post_norms: tuple[str, ...]) -> None:
    """Rescale what each layer adds to the residual stream to FIRST * DECAY**i, measured on random tokens."""
    layers: Any = model.model.layers
    ids = torch.randint(3, model.config.vocab_size, (4, 48))
    seen: dict[str, torch.Tensor] = {}

    def measure(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        seen["added"] = (output[0] if isinstance(output, tuple) else output) - before

    for index, layer in enumerate(layers):
        for _ in range(3):  # attention changes what the MLP adds, so one rescaling is not exact
            hook = layer.register_forward_hook(measure, with_kwargs=True)
            model(input_ids=ids)
            hook.remove()
            factor = FIRST * DECAY**index / float(seen["added"].std())
            for part in _outputs(layer, post_norms):
                if post_norms:  # their gain is 1 + weight
                    part.copy_((1 + part) * factor - 1)
                else:
                    part.mul_(factor)


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Scale the final norm, not the lm_head: that is tied to the embedding in some models."""
    logits = model(input_ids=torch.randint(3, model.config.vocab_size, (4, 48))).logits
    gain = model.model.norm.weight
    offset = 1.0 if model.config.model_type.startswith("gemma") else 0.0  # Gemma's gain is 1 + weight
    gain.copy_((offset + gain) * (SHARPNESS / logits.std()) - offset)


def _outputs(layer: Any, post_norms: tuple[str, ...]) -> list[torch.Tensor]:
    """The weights that scale what `layer` adds to the residual stream."""
    if post_norms:
        return [getattr(layer, name).weight for name in post_norms]
    names = ("o_proj.weight", "mlp.down_proj.weight", "mlp.experts.down_proj")
    return [weight for name, weight in layer.named_parameters() if name.endswith(names)]
