"""Sizes of the tests' models (tests/engine/models.py) on a GPU, whose kernels ask for other ones than a CPU's."""

from typing import Any

# FlashAttention 3 is batch-invariant at head size 128; at 64 it is not invariant to the query length.
DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
# Latent attention makes a key for each query head, so there are as many of both; head_dim is models.py's own.
LATENT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_OWN = {
    # The config of these experts has a size of its own (moe_intermediate_size).
    "qwen3_moe": {name: value for name, value in DENSE.items() if name != "intermediate_size"},
    "deepseek_v2": LATENT,
    # With a sliding window, FlashAttention 3 is not invariant to the query length: vLLM's n-gram drafts part from the
    # baseline too (15 of 64 requests).
    "mistral": DENSE | {"sliding_window": None},
}


def shape(name: str) -> dict[str, Any]:
    """Changes to the transformers config of the model `name` of models.py."""
    return _OWN.get(name, DENSE)
