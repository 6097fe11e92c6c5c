"""Bytes that a step reads, and that weights occupy."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from selfspec_cli.vllm_plugin.decoder import has_experts, layers_of, output_projection
from selfspec_cli.vllm_plugin.exit_head import TargetHead
from selfspec_cli.vllm_plugin.fused_step.drafting import FusedStep
from selfspec_cli.vllm_plugin.vllm_names import KVCacheConfig


def step_bytes(
    target: nn.Module, trunk: nn.Module, head: TargetHead, kv_cache: KVCacheConfig, fused: FusedStep | None = None
) -> dict[str, float] | None:
    """Bytes read by one full step, and by one draft step through `trunk` and `head`, for what is bound by memory.
    Weights of the layers and the head, for the draft those that it runs on (copies, or those of `fused`, one kernel for
    all layers); "..._kv_token": keys and values of one token of context. Embeddings are looked up, not read. None for a
    mixture of experts, whose step reads only some of its weights."""
    parts, lm_head = layers_of(target), output_projection(target)
    if any(map(has_experts, parts)):
        return None
    exit_layers: tuple[nn.Module, ...] = trunk.drafting_layers  # type: ignore[assignment]
    exit_parts = [*(() if fused is not None else exit_layers), *([lm_head] if head.reads_lm_head else [])]
    own = [] if fused is None else fused.read_by_a_step()
    groups = kv_cache.kv_cache_groups
    a_layer = groups[0].kv_cache_spec.page_size_bytes / groups[0].kv_cache_spec.block_size
    return {
        "full": weight_bytes([*parts, lm_head]),
        "draft": weight_bytes(exit_parts, [*head.tensors, *own]),
        "full_kv_token": a_layer * len(parts),
        "draft_kv_token": a_layer * len(exit_layers),
    }


def weight_bytes(modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that the weights of `modules`, and loose `tensors`, occupy: each storage and each submodule once. vLLM
    packs linear weights on the CPU and empties the parameter; such a layer counts with the size that it had."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    own = [tensor for part in parts for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*own, *tensors]
        if tensor.device.type != "meta" and tensor.numel()
    }
    return sum(storages.values()) + sum(_packed_bytes(part) for part in parts)


def _packed_bytes(part: Any) -> int:
    weight = getattr(part, "weight", None)
    if not hasattr(part, "cpu_linear") or not isinstance(weight, torch.Tensor) or weight.numel():
        return 0
    # A layer that no rank shares, such as the router of experts, has no size per partition.
    rows, columns = (getattr(part, f"{side}_size_per_partition", None) for side in ("output", "input"))
    return int((rows or part.output_size) * (columns or part.input_size) * weight.itemsize)
