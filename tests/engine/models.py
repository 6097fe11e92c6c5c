"""Tiny random-weight models whose early exits are sometimes right: what every engine test runs on.

Random weights alone make early exits useless (every layer changes everything) and greedy output degenerate (tied
embeddings repeat the last token). So each layer's contribution to the residual stream is measured and rescaled to a
geometric series: the first layer outweighs the embedding, and each later one matters less, so that the agreement of
exit E with the last layer grows with E and is neither 0 nor 1. Weights are fp32 with a fixed seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS = 8
VOCAB = 256
MAX_LEN = 512
EOS = 2
FIRST, DECAY = 4.0, 0.72  # std of what the first layer adds (the embedding's is 1), and of each next relative to it
SHARPNESS = 3.0  # std of the logits: some predictions are sure, some are not, so gates have something to tell apart

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WINDOW = 48  # tokens: shorter than most sequences of the tests


@dataclass(frozen=True)
class Tiny:
    """One architecture.

    config: name of its class in transformers. changes: to _SHAPE. post_norms: norms on what a layer adds, which hide
    the scale of the weights before them."""

    config: str
    changes: dict[str, Any]
    post_norms: tuple[str, ...] = ()

    def make(self, **more: Any) -> Any:
        """The transformers config."""
        import transformers

        return getattr(transformers, self.config)(**{**_SHAPE, **self.changes, **more})


_GEMMA_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_TIED = {"tie_word_embeddings": True}  # vLLM's Gemma has no lm_head of its own
# Soft-capping of Gemma 2's logits and attention is on by default; sliding windows alternate with full attention.
_GEMMA2 = _TIED | {"sliding_window": _WINDOW, "query_pre_attn_scalar": 32}
_GEMMA3_KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * (LAYERS // 4)
# Llama 4's text decoder (Scout's): each third layer without positions and with full attention, the others in chunks;
# every second layer a mixture of experts beside a shared one.
_LLAMA4 = {
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 64,
    "no_rope_layers": [1, 1, 0] * (LAYERS // 3) + [1] * (LAYERS % 3),
}
# Latent attention in the one shape that vLLM's CPU kernel has; all layers but the first have a shared expert.
_DEEPSEEK_V2 = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,  # what rotary positions are made for
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

ARCHITECTURES = {
    "llama": Tiny("LlamaConfig", {}),
    "llama_small_vocab": Tiny("LlamaConfig", {"vocab_size": 32}),
    "qwen3": Tiny("Qwen3Config", {}),
    "mistral": Tiny("MistralConfig", {"sliding_window": _WINDOW}),
    "gemma": Tiny("GemmaConfig", _TIED | {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": Tiny("Gemma2Config", _GEMMA2, _GEMMA_NORMS),
    "gemma3": Tiny("Gemma3TextConfig", _GEMMA2 | {"layer_types": _GEMMA3_KINDS}, _GEMMA_NORMS),
    "qwen3_moe": Tiny("Qwen3MoeConfig", _EXPERTS),
    "mixtral": Tiny("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": Tiny("Llama4TextConfig", _LLAMA4),
    "deepseek_v2": Tiny("DeepseekV2Config", _DEEPSEEK_V2),
}


def vocab_of(name: str) -> int:
    """Token ids of the model run from 0 to this, exclusive."""
    return int(ARCHITECTURES[name].make().vocab_size)


def save_tiny(
    name: str,
    folder: Path,
    seed: int = 0,
    grade: dict[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Make the model `name` of ARCHITECTURES on the current device and save it to `folder`, as `vllm.LLM` loads it.

    grade: other values than FIRST, DECAY and SHARPNESS ("first", "decay", "sharpness"), for other depths, widths and
    vocabularies. dtype: of the file. changes: to its transformers config."""
    grade = {"first": FIRST, "decay": DECAY, "sharpness": SHARPNESS} | (grade or {})
    from transformers import AutoModelForCausalLM

    tiny = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny.make(**changes), dtype=torch.float32).eval()
    _randomise(model)
    _grade(model, tiny.post_norms, grade["first"], grade["decay"])
    _sharpen(model, grade["sharpness"])
    model.to(dtype).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, *more: str) -> None:
    """One token a byte, for what needs text (structured output). Ids 0 to 2 are special, so three bytes have none.

    more: special tokens with the last ids, in place of as many bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - len(special) - len(more)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters, *more])}, merges=[]))
    tokenizer.add_special_tokens(list(more))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[EOS]
    ).save_pretrained(folder)


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Matrices that keep the size of what they map, and norms that are not all ones: no path is right by accident."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.add_(0.2 * torch.randn_like(weight))
        elif "embed_tokens" in name and not model.config.tie_word_embeddings:
            weight.normal_(std=1.0)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)


@torch.no_grad()
def _grade(model: nn.Module, post_norms: tuple[str, ...], first: float, decay: float) -> None:
    """Rescale what each layer adds to the residual stream to first * decay**i, measured on random tokens."""
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
            factor = first * decay**index / float(seen["added"].std())
            for part in _outputs(layer, post_norms):
                if post_norms:  # their gain is 1 + weight
                    part.copy_((1 + part) * factor - 1)
                else:
                    part.mul_(factor)


@torch.no_grad()
def _sharpen(model: nn.Module, std: float) -> None:
    """Scale the final norm, not the lm_head: that is tied to the embedding in some models."""
    logits = model(input_ids=torch.randint(3, model.config.vocab_size, (4, 48))).logits
    gain = model.model.norm.weight
    offset = 1.0 if model.config.model_type.startswith("gemma") else 0.0  # Gemma's gain is 1 + weight
    gain.copy_((offset + gain) * (std / logits.std()) - offset)


def _outputs(layer: Any, post_norms: tuple[str, ...]) -> list[torch.Tensor]:
    """The weights that scale what `layer` adds to the residual stream."""
    if post_norms:
        return [getattr(layer, name).weight for name in post_norms]
    names = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    return [weight for name, weight in layer.named_parameters() if name.endswith(names)]
