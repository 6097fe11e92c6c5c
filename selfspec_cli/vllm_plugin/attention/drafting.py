"""The draft's attention in one kernel (one_query.py), where a layer of vLLM's attends to the whole context.

A layer's keys, values and KV cache stay vLLM's, found by the layer's name. Only drafts are computed so: the verify pass
runs vLLM's kernels, so another way to round a sum can change a draft and no output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.weights.shared import Make

OPERATOR = "selfspec::attend_once"
DIMS = (64, 128)  # of a head; the kernel has been timed with these
PLAIN = ("auto", "bfloat16", "float16")  # kinds of a KV cache that holds what the layers make
OTHER = "early exit: drafts attend by vLLM's own kernels, because keys and values are kept as %s"
UNKNOWN = "early exit: drafts attend by vLLM's own kernels, because ours does not know this layout of the KV cache"


class OneQueryAttention(nn.Module):
    """Stands in for vLLM's `Attention` in a layer that drafts, and holds on to it."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.layer_name: str = attention.layer_name  # some models pass it on

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None, *more: Any, **named: Any) -> Tensor:
        """query [n, query heads * dim], key and value [n, heads * dim] -> [n, query heads * dim].
        With anything more, such as a shape for the output, or without keys and values, vLLM's layer is called."""
        own, name = self.attention, self.layer_name
        if more or named or key is None or value is None:
            found: Tensor = own(query, key, value, *more, **named)
            return found
        query = query.view(-1, own.num_heads, own.head_size)
        key, value = (x.view(-1, own.num_kv_heads, own.head_size) for x in (key, value))
        out: Tensor = torch.ops.selfspec.attend_once(query, key, value, name)
        return out


def on_one_query(vllm_config: vllm.VllmConfig, device: torch.device) -> Make | None:
    """For `shared.replace_in_layers`: one kernel for an `Attention` that it can stand in for; else None."""
    on_cuda = device.type == "cuda" and torch.version.cuda is not None
    if not on_cuda or vllm_config.parallel_config.decode_context_parallel_size > 1:
        return None
    from selfspec_cli.vllm_plugin.weights.rounding import none_arrived  # a machine without a GPU may lack Triton

    none_arrived(device)  # not first while a CUDA graph is captured
    stored = vllm_config.cache_config.cache_dtype
    if stored not in PLAIN:
        vllm.init_logger("vllm.selfspec").info_once(OTHER, stored)

    def make(module: nn.Module, name: str) -> nn.Module | None:
        return OneQueryAttention(module) if type(module) is vllm.Attention and is_plain(module) else None

    return make


def is_plain(attention: Any) -> bool:
    """Whether a layer is FlashAttention to the whole context, on keys and values of the model's own type."""
    impl = attention.impl
    return (
        attention.attn_backend.get_name() == "FLASH_ATTN"
        and attention.attn_type == "decoder"
        and attention.head_size in DIMS
        and attention.head_size_v == attention.head_size
        and attention.kv_cache_dtype in PLAIN
        and attention.kv_sharing_target_layer_name is None
        and impl.sliding_window == (-1, -1)
        and not impl.logits_soft_cap
        and impl.alibi_slopes is None
        and impl.sinks is None
    )


@torch.library.custom_op(
    OPERATOR, mutates_args=(), schema="(Tensor query, Tensor key, Tensor value, str layer_name) -> Tensor"
)
def _attend_once(query: Tensor, key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    from selfspec_cli.vllm_plugin.attention.one_query import attend, fits

    metadata, layer, cache, slots = vllm.get_attention_context(layer_name)
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    if metadata is None:  # vLLM's profiling run: there is no KV cache yet
        return out.zero_()
    count = min(len(query), len(metadata.seq_lens))
    known = fits(cache, key.shape[1], key.shape[2])
    if not known:
        vllm.init_logger("vllm.selfspec").warning_once(UNKNOWN)
    if known and metadata.max_query_len == 1:
        attend(
            query[:count],
            key[:count],
            value[:count],
            cache,
            metadata.block_table,
            metadata.seq_lens,
            slots,
            layer.impl.scale,
            out,
        )
    else:
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
        layer.impl.forward(layer, query, key, value, cache, metadata, out.view_as(query))
    return out


@_attend_once.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
