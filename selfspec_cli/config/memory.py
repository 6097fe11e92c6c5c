"""Whether a model fits a GPU, before it is downloaded: its weights, the copies that draft, keys and values.

Arithmetic on what config.json and the sizes of the weight files say; nothing is loaded. vLLM's own buffers, CUDA graphs
and activations come on top, which is why the sum is compared with `engine.gpu_memory_utilization` of a GPU's memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.machine import asked_of_gpus, visible
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

GIB = 2**30
VLLM_SHARE = 0.92  # of a GPU's memory, where `gpu_memory_utilization` is not given
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes on each of the GPUs that share a model.

    weights: the checkpoint's. copies: those that draft. kv_token: keys and values of one token of context, None where
    config.json does not say. tokens: the longest request that is asked for, None where nothing says.
    """

    weights: int
    copies: int
    kv_token: int | None
    tokens: int | None

    @property
    def least(self) -> int:
        """Without which no engine starts: weights, copies, and the keys and values of one longest request."""
        return self.weights + self.copies + (self.kv_token or 0) * (self.tokens or 0)

    def __str__(self) -> str:
        parts = [f"weights {self.weights / GIB:.1f} GiB"]
        if self.copies:
            parts.append(f"copies that draft {self.copies / GIB:.1f} GiB")
        if self.kv_token and self.tokens:
            parts.append(f"one request of {self.tokens:,} tokens {self.kv_token * self.tokens / GIB:.1f} GiB")
        return " + ".join(parts)


def needed(
    document: Mapping[str, Any], weights: int, draft_weights: str, drafting: float, tokens: int | None, ranks: int = 1
) -> Memory:
    """What a model takes of each GPU.

    Args:
        document: its config.json. weights: bytes of its weight files. draft_weights: a name of the registry.
        drafting: share of the layers that draft, 0 to 1. tokens: the longest request. ranks: GPUs that share a layer.
    """
    text = document.get("text_config", document)
    kind = DRAFT_WEIGHTS[draft_weights]
    width = _BYTES.get(str(text.get("torch_dtype", text.get("dtype", document.get("torch_dtype")))), 2)
    copies = int(weights / (8 * width) * kind.bits * drafting) if kind.copies and kind.bits else 0
    return Memory(weights // ranks, copies // ranks, kv_token_bytes(text, ranks), tokens)


def kv_token_bytes(text: Mapping[str, Any], ranks: int = 1) -> int | None:
    """Bytes of keys and values that one token leaves in all layers, in 16 bits, on each of `ranks` GPUs; None where
    config.json does not say."""
    itemsize = 2
    layers = text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers")
    if not layers:
        return None
    if text.get("kv_lora_rank"):  # latent attention keeps one vector a token and layer, the same on every GPU
        return int(layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)) * itemsize)
    heads = text.get("num_attention_heads") or text.get("n_head")
    hidden = text.get("hidden_size") or text.get("n_embd")
    if not heads or not (hidden or text.get("head_dim")):
        return None
    size = text.get("head_dim") or hidden // heads
    kept = max((text.get("num_key_value_heads") or heads) // ranks, 1)  # vLLM copies heads that are fewer than GPUs
    return int(2 * layers * kept * size * itemsize)


def gpu_memory(wanted: str | None) -> list[tuple[str, int]]:
    """(name, bytes) of the GPUs that CUDA shows to this process; empty without any. wanted: CUDA_VISIBLE_DEVICES."""
    cards = asked_of_gpus("uuid,name,memory.total")
    places = visible([(uuid, str(number)) for number, (uuid, *_) in enumerate(cards)], wanted)
    return [(cards[int(place)][1], int(cards[int(place)][2]) * 2**20) for place in places]


def verdict(memory: Memory, cards: list[tuple[str, int]], share: float | None) -> tuple[bool | None, str]:
    """Whether it fits the smallest of the GPUs, None without one, and the sum in words.

    share: what vLLM may take of a GPU (`engine.gpu_memory_utilization`); None is vLLM's own default.
    """
    if not cards:
        return None, f"needs {memory} and vLLM's own buffers"
    name, size = min(cards, key=lambda card: card[1])
    share = VLLM_SHARE if share is None else share
    room = int(size * share)
    return memory.least <= room, f"needs {memory}; {name} gives {room / GIB:.1f} GiB ({share:.0%} of its memory)"
