"""The reference model in plain PyTorch: a Llama whose parameter names are those of the Hugging Face checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

MAX_SHARD_BYTES = 15_900_000
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
SPECIAL_IDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}


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


class Linear(nn.Linear):
    """No bias; fp32 master weights are cast to the dtype of the activations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, head_dim]; both halves of a head turn by the same angles."""
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.positions).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, time, head_dim]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = SwiGLU(shape)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, keep: Tensor | None) -> Tensor:
        """h [batch, time, hidden]; keep [batch, 1, 1] of ones and zeros, or None to keep the layer for all samples."""
        attended = self.self_attn(self.input_layernorm(h), cos, sin)
        h = h + (attended if keep is None else attended * keep)
        fed = self.mlp(self.post_attention_layernorm(h))
        return h + (fed if keep is None else fed * keep)


class Llama(nn.Module):
    """Decoder with tied embeddings: one final norm and one lm_head (the embedding matrix) serve every exit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def hidden_states(
        self, ids: Tensor, exits: tuple[int, ...], dtype: torch.dtype = torch.float32, keep: Tensor | None = None
    ) -> list[Tensor]:
        """Residual streams [batch, time, hidden] after each number of layers in `exits` (ascending).

        ids: [batch, time] token ids. keep: [layers, batch], 0 where a sample skips a layer, or None.
        """
        time = ids.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        h = self.embed_tokens(ids).to(dtype)
        states = []
        for index, layer in enumerate(self.layers):
            h = layer(h, cos, sin, None if keep is None else keep[index].view(-1, 1, 1))
            if index + 1 in exits:
                states.append(h)
        return states

    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits [..., vocab] of a residual stream [..., hidden], through the shared norm and head."""
        return F.linear(self.norm(h), self.embed_tokens.weight.to(h.dtype))


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
        **SPECIAL_IDS,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def export(model: Llama, folder: Path) -> None:
    """Write bf16 safetensors shards with their index, config.json, generation_config.json, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, weight in model.state_dict().items():
        tensor = weight.detach().to("cpu", torch.bfloat16).contiguous()
        if used + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][f"model.{name}"] = tensor
        used += tensor.nbytes
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": model.shape.positions,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": places},
        "config.json": hugging_face_config(model.shape),
        "generation_config.json": SPECIAL_IDS,
        "tokenizer_config.json": tokenizer,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
