"""Which models the kernel for a whole trunk knows, and what it is compiled for."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.vllm_plugin.attention.drafting import OneQueryAttention
from selfspec_cli.vllm_plugin.fused_step.layout import PHASES, ROWS, Shape
from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight

WARPS = 12  # of a block
SWITCH = "SELFSPEC_FUSED_STEP"
"""Environment variable: 0 leaves draft steps to kernels for single products, where this one is in doubt."""
MODELS = ("qwen2.Qwen2Model", "qwen3.Qwen3Model", "llama.LlamaModel", "mistral.MistralModel")
LAYERS = tuple(name.removesuffix("Model") + "DecoderLayer" for name in MODELS)
"""Whose forward is what the kernel does. vLLM's other layers have other norms, sums or multipliers."""
Copied = Callable[[int], Any]
"""The layer of this number on copies of its weights (`draft_weights.integers`), made anew or held by a trunk."""


def reason_against(
    decoder: nn.Module, layers: Sequence[Any], copied: Copied, vllm_config: Any, device: torch.device
) -> str | None:
    """Why the kernel is not to run these layers of a decoder of vLLM's on this device; None if it is."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        return "weights are split over tensor-parallel ranks"
    model = _name(type(decoder))
    if model not in MODELS:  # others may keep their layers elsewhere
        return f"it does not know {model}"
    unknown = next((name for layer in layers if (name := _name(type(layer))) not in LAYERS), None)
    if unknown is not None:
        return f"it does not know {unknown}"
    different = next(filter(None, map(_difference, layers)), None) or _unlike(layers)
    if different is not None:
        return different
    if not all(map(copy_of, linears_of(copied(0)).values())):
        return "the copies are not of 4 bits"
    shape = shape_of(layers, page=16)
    return _misfit(shape) or _machine(shape, device)


def _name(kind: type) -> str:
    """Such as llama.LlamaModel; the whole name of what is not vLLM's."""
    return f"{kind.__module__}.{kind.__name__}".removeprefix("vllm.model_executor.models.")


def linears_of(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return {"qkv": attention.qkv_proj, "o": attention.o_proj, "gate_up": mlp.gate_up_proj, "down": mlp.down_proj}


def _difference(layer: Any) -> str | None:
    """What of a layer the kernel does not do."""
    attention, rotary = layer.self_attn, layer.self_attn.rotary_emb
    linears = linears_of(layer)
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms_of(attention)]
    checks = {
        "the attention is not one to the whole context on a KV cache of bfloat16": not isinstance(
            attention.attn, OneQueryAttention
        ),
        "a product other than that of queries, keys and values has a bias": any(
            linears[name].bias is not None for name in PHASES[1:]
        ),
        "its norms are not RMS norms of all columns with weights of bfloat16": not all(
            _is_plain_norm(norm) for norm in norms
        ),
        "its activation is not SiLU times the other half": type(layer.mlp.act_fn).__name__
        not in ("Activation", "SiluAndMul"),
        "its positions are not rotary ones over whole heads": not _is_plain_rotary(rotary, attention.head_dim),
        "queries are scaled by their positions": bool(getattr(attention, "do_llama_4_scaling", False)),
        "its norms depend on a condition": getattr(layer, "ada_rms_norm_t_cond", None) is not None,
    }
    return next((reason for reason, found in checks.items() if found), None)


def head_norms_of(attention: Any) -> list[Any]:
    """Norms of queries and keys, where there are any."""
    return [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def copy_of(linear: Any) -> dict[str, Tensor]:
    """The copy of 4 bits of a linear layer, as `draft_weights.integers` has it; empty where there is none."""
    copy = getattr(linear, "copy_of_weight", None)
    parameters = copy._parameters if type(copy) is CopiedWeight else {}
    words, scales = parameters.get("words"), parameters.get("scales")
    if words is None or scales is None or words.shape[1] * 8 != scales.shape[1] * GROUP:
        return {}
    return {"words": words, "scales": scales}


def _is_plain_norm(norm: Any) -> bool:
    whole = getattr(norm, "variance_size_override", None) is None
    dtype = getattr(getattr(norm, "weight", None), "dtype", None)
    return type(norm).__name__ == "RMSNorm" and dtype is torch.bfloat16 and whole


def _is_plain_rotary(rotary: Any, dim: int) -> bool:
    """Whether cosines and sines are all that a rotary embedding has of its own."""
    base: Any = next((one for one in type(rotary).__mro__ if one.__name__ == "RotaryEmbedding"), None)
    own = base is not None and type(rotary).forward_native is base.forward_native
    whole = own and rotary.is_neox_style and rotary.rotary_dim == rotary.head_size == dim
    return bool(whole) and rotary.cos_sin_cache.dtype in (torch.float32, torch.bfloat16)


def _unlike(layers: Sequence[Any]) -> str | None:
    """Whether layers differ in what the kernel is compiled for."""
    kinds = {
        (
            *map(size_of, linears_of(layer).values()),
            linears_of(layer)["qkv"].bias is not None,
            len(head_norms_of(layer.self_attn)),
            layer.self_attn.num_heads,
            layer.self_attn.num_kv_heads,
            layer.input_layernorm.variance_epsilon,
        )
        for layer in layers
    }
    return None if len(kinds) == 1 else "its layers are not all alike"


def size_of(linear: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, whatever form its weight has."""
    return linear.output_size_per_partition, linear.input_size_per_partition


def shape_of(layers: Sequence[Any], page: int) -> Shape:
    """What the kernel is compiled for. page: tokens of a block of the KV cache."""
    attention, linears = layers[0].self_attn, linears_of(layers[0])
    return Shape(
        layers=len(layers),
        hidden=size_of(linears["qkv"])[1],
        intermediate=size_of(linears["down"])[1],
        query_heads=attention.num_heads,
        heads=attention.num_kv_heads,
        dim=attention.head_dim,
        page=page,
        epsilon=layers[0].input_layernorm.variance_epsilon,
        bias=linears["qkv"].bias is not None,
        head_norms=bool(head_norms_of(attention)),
        rope_float=attention.rotary_emb.cos_sin_cache.dtype is torch.float32,
    )


def _misfit(shape: Shape) -> str | None:
    """What of a shape the kernel has no code for."""
    fewest = min(shape.groups.values())
    if shape.dim not in (64, 128) or shape.query_heads // shape.heads > 8:
        shared = shape.query_heads // shape.heads
        return f"heads have {shape.dim} dimensions and {shared} share a KV head; it knows 64 and 128, and at most 8"
    if fewest < WARPS:
        return f"rows of {fewest * GROUP} values are too short for {WARPS} warps"
    if shape.hidden % ROWS or shape.qkv % ROWS or shape.intermediate % 32:
        return "its weights do not divide into tiles of 16 rows"
    return None


def _machine(shape: Shape, device: torch.device) -> str | None:
    """Why the kernel cannot run on a device."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs an NVIDIA GPU of compute capability 9.0"
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error})"
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    if shape.heads > blocks or shape.tiles["gate_up"] < 4 * blocks:
        return f"{blocks} multiprocessors do not each find a share of its layers"
    return None
