"""What the choice of a draft (early_exit/defaults.py), and copies of weights, ask of the target and this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from selfspec_cli.early_exit.defaults import Target
from selfspec_cli.early_exit.draft_weights.base import WeightFacts
from selfspec_cli.vllm_plugin import vllm_names as vllm

EXIT_LAYER = "early_exit_layer"
"""Key of a checkpoint's config.json: the layer after which it was trained to exit."""
FEW_BITS = ("awq", "gptq", "bitsandbytes", "mxfp4", "fp4", "gguf", "int4", "w4")
"""Parts of the names of quantisation methods that mean 4 bits or so where the config says nothing more."""


def target_of(args: vllm.EngineArgs, model: vllm.ModelConfig, parallel: vllm.ParallelConfig) -> Target:
    """The facts of an engine that is about to start."""
    config, ranks = model.hf_text_config, parallel.tensor_parallel_size
    bits = bits_of(model.quantization, getattr(model.hf_config, "quantization_config", None))
    parameters = linear_parameters(config) / ranks
    vocabulary = int(model.get_vocab_size())
    memory = left = None
    if vllm.current_platform.is_cuda():
        memory = float(vllm.current_platform.get_device_total_memory())
        weights = parameters * bits / 8 + 4 * vocabulary * model.get_hidden_size() / ranks
        # With a cache of this size vLLM looks at no share of the memory, and copies take nothing from the cache.
        cache = args.kv_cache_memory_bytes
        usable = memory * float(args.gpu_memory_utilization or 0.9) if cache is None else memory - cache
        left = usable - weights
    own = getattr(config, EXIT_LAYER, None)
    exit_layer = own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else None
    requests = args.max_num_seqs or 256
    return Target(
        weights=facts_of(model, parallel),
        bits=bits,
        parameters=parameters,
        exit_layer=exit_layer,
        left=left,
        memory=memory,
        logits=float(requests * vocabulary),
    )


def facts_of(target: vllm.ModelConfig, parallel: vllm.ParallelConfig) -> WeightFacts:
    """What `DraftWeights.reason_against` asks of the target that vLLM has configured, and of this machine."""
    platform = vllm.current_platform
    capability = platform.get_device_capability() if platform.is_cuda() else None
    return WeightFacts(
        device="cuda" if platform.is_cuda() else "cpu",
        dtype=str(target.dtype).removeprefix("torch."),
        quantization=target.quantization or "",
        is_moe=target.is_moe,
        expert_parallel=bool(parallel.enable_expert_parallel),
        row_lengths=_row_lengths(target, parallel),
        capability=None if capability is None else (capability.major, capability.minor),
        device_name=platform.device_name,
    )


def _row_lengths(target: vllm.ModelConfig, parallel: vllm.ParallelConfig) -> tuple[int, ...]:
    """Lengths of a rank's rows of weights that every layer has, as far as the config names them."""
    config, ranks = target.hf_text_config, parallel.tensor_parallel_size
    intermediate = None if target.is_moe else getattr(config, "intermediate_size", None)
    return (int(target.get_hidden_size()), *([] if not isinstance(intermediate, int) else [intermediate // ranks]))


def bits_of(method: str | None, config: Mapping[str, Any] | None) -> float:
    """Bits of a target's weights, by vLLM's name of its quantisation method and the checkpoint's own description."""
    if not method:
        return 16.0
    described = dict(_numbers(config or {}))
    for key in ("num_bits", "bits", "w_bit", "weight_bits"):
        if key in described:
            return float(described[key])
    return 4.0 if any(part in method.lower() for part in FEW_BITS) else 8.0


def _numbers(config: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The whole numbers of a description; those of activations and of the KV cache say nothing of weights."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from () if "activations" in key or "cache" in key else _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def linear_parameters(config: Any) -> float:
    """Weights of a decoder's layers, by the usual names of its config; about right for any of them."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * size * (heads + kv_heads)
    experts = max(getattr(config, name, None) or 1 for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    inner = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    inner = inner or getattr(config, "intermediate_size", None) or 4 * hidden
    return float(layers * (attention + 3 * hidden * inner * experts))
