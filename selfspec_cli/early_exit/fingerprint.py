"""A short stable name for a model, so that a head fitted on one is refused by another."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
"""The fields of a Hugging Face config.json that define the shape; those that libraries rewrite are left out."""

_SAMPLES = 64  # values per axis at most: enough to tell fine-tunes apart, nothing to read


def model_fingerprint(config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over the architecture and a small sample of weights.

    config: the model's config as a mapping; `text_config` is used where a multimodal model nests it. tensors: (name,
    tensor) pairs that every way of loading the model leaves unquantised; the token embedding [V, hidden] and the final
    norm [hidden] are the good choice. They are taken in order of name, but names are not hashed, for loaders rename.

    From each tensor, up to 64 x 64 values at even spacing are rounded to bfloat16 before hashing: a model stored in
    bf16 and served in fp32, or stored in fp32 and served in bf16, keeps its fingerprint. Serving bf16 weights in fp16
    may change it (fp16 cannot hold the smallest values). Rows beyond `vocab_size` (padding) are not sampled. With
    tensor parallelism pass replicated tensors only, or gather first.
    """
    text = config.get("text_config") or config
    shape = {name: text.get(name, config.get(name)) for name in CONFIG_FIELDS}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for _, tensor in sorted(tensors, key=lambda pair: pair[0]):
        rows = min(tensor.shape[0], shape["vocab_size"] or tensor.shape[0])
        sample = tensor.detach()[_spaced(rows, tensor.device)]
        if tensor.dim() > 1:
            sample = sample.flatten(1)
            sample = sample[:, _spaced(sample.shape[1], tensor.device)]
        # The float32 step makes every storage dtype round once, to the same bfloat16; adding 0 turns -0 into 0.
        rounded = (sample.float().to(torch.bfloat16) + 0.0).cpu().contiguous()
        digest.update(bytes(rounded.view(torch.uint8).flatten().tolist()))  # no numpy here
    return digest.hexdigest()[:16]


def _spaced(length: int, device: torch.device) -> Tensor:
    """Up to 64 indices from 0 to length - 1 at even spacing, in integer arithmetic: the same on every device."""
    count = min(length, _SAMPLES)
    return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)
