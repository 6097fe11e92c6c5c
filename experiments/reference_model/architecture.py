"""The reference model: transformers' Llama, whose layers a sample can skip, and whose residual streams are kept."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

MAX_SHARD_SIZE = "15900KB"
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


@dataclass(frozen=True)
class Shape:
    layers: int = 24
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 4096
    positions: int = 1024
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0


TINY = Shape(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, positions=128)


class Llama(LlamaModel):
    """Decoder with tied embeddings: one final norm and one lm_head (the embedding matrix) serve every exit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(LlamaConfig(**hugging_face_config(shape)))
        self.shape = shape
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def hidden_states(
        self, ids: Tensor, exits: tuple[int, ...], dtype: torch.dtype = torch.float32, keep: Tensor | None = None
    ) -> list[Tensor]:
        """Residual streams [batch, time, hidden] after each number of layers in `exits` (ascending).

        ids: [batch, time] token ids. keep: [layers, batch], 0 where a sample skips a layer, or None. Weights are fp32;
        products are computed in `dtype`.
        """
        h, states = self.embed_tokens(ids).to(dtype), []
        rotary = self.rotary_emb(h, torch.arange(ids.shape[1], device=ids.device)[None])
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            for index, layer in enumerate(self.layers):
                after = layer(h, position_embeddings=rotary)
                h = after if keep is None else torch.where(keep[index].view(-1, 1, 1) > 0, after, h)
                if index + 1 in exits:
                    states.append(h)
        return states

    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits [..., vocab] of a residual stream [..., hidden], through the shared norm and head."""
        return F.linear(self.norm(h).to(h.dtype), self.embed_tokens.weight.to(h.dtype))


def hugging_face_config(shape: Shape) -> dict:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def export(model: Llama, folder: Path) -> None:
    """Write bf16 safetensors shards with their index, config.json, generation_config.json, tokenizer_config.json."""
    whole = LlamaForCausalLM(model.config)
    whole.model.load_state_dict(model.state_dict())
    whole.to(torch.bfloat16).save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    token = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": model.shape.positions,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in {
        "config.json": hugging_face_config(model.shape),
        "generation_config.json": token,
        "tokenizer_config.json": tokenizer,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
