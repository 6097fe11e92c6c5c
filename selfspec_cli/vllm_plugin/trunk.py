"""The draft model: the target's own decoder, cut after E layers. No weight is copied (but for 8-bit copies, on request:
fp8_copies.py), no architecture is named.

About sixty of vLLM's decoders loop over `islice(self.layers, self.start_layer, self.end_layer)`, because pipeline
parallelism needs it. A second view of the same module whose `end_layer` is E is therefore the first E layers plus the
final norm. Attention layers find their KV cache by name, so the view shares that too.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec_cli.early_exit.settings import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from selfspec_cli.vllm_plugin.exit_head import TargetHead


def language_model(model: Any) -> nn.Module:
    """The causal LM inside a multimodal wrapper; a causal LM is its own."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that loops over the decoder layers, inside a causal LM or a multimodal wrapper around one.

    Raises SettingsError, naming the architecture, if its forward does not cut its own loop at `end_layer`.
    """
    model = language_model(model)
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, nn.Module) or not _cuts_at_end_layer(decoder):
        raise SettingsError(
            f"architecture {type(model).__name__} is not supported: its forward has no loop over self.layers that ends "
            "at self.end_layer (what vLLM's pipeline parallelism uses), so it cannot be run up to an exit layer"
        )
    return decoder


def _cuts_at_end_layer(decoder: Any) -> bool:
    if not all(hasattr(decoder, name) for name in ("layers", "start_layer", "end_layer")):
        return False
    # The compile decorator replaces __call__, not forward, so this is the source that runs.
    classes: Any = type(decoder).__mro__
    for kind in (kind for kind in classes if "forward" in vars(kind)):
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))))
        loops = [part for node in nodes if isinstance(node, ast.For) for part in ast.walk(node.iter)]
        if any(isinstance(part, ast.Attribute) and part.attr == "end_layer" for part in loops):
            return True
        if not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "super().forward" for node in nodes):
            return False  # a forward of its own; one that only passes on (Mistral's) is judged by what it passes on to
    return False


def cut(decoder: nn.Module, layers: int) -> None:
    """Make `decoder` itself end after its first `layers` layers (method `skip`). Call before its first forward."""
    decoder.end_layer = layers  # type: ignore[assignment]


def first_layers(decoder: nn.Module, layers: int, vllm_config: VllmConfig, draft_weights: str = "shared") -> nn.Module:
    """A module over `decoder`'s own parameters that runs its first `layers` layers and the final norm.

    Call it as `trunk(input_ids [n], positions [n], None)` -> normed hidden states [n, hidden]. It is compiled exactly
    when the target is, as a function of its own. draft_weights: "fp8" puts 8-bit copies in place of the linear weights
    of those layers; raises SettingsError where there can be none.
    """
    trunk = _view(decoder, layers, draft_weights)
    cut(trunk, layers)
    if draft_weights == "fp8":
        from selfspec_cli.vllm_plugin.fp8_copies import copied_layers

        # The view shares the dict of submodules with the target, which must keep its own layers.
        copies = copied_layers(decoder.layers, layers, vllm_config)  # type: ignore[arg-type]
        trunk.__dict__["_modules"] = {**decoder._modules, "layers": copies}
    if hasattr(trunk, "aux_hidden_state_layers"):
        trunk.aux_hidden_state_layers = ()  # type: ignore[assignment]
    if not getattr(trunk, "do_not_compile", True):
        _compile_anew(trunk, layers, vllm_config, draft_weights)
    return trunk


def _view(decoder: nn.Module, layers: int, draft_weights: str) -> nn.Module:
    """A shallow copy (same parameters, same submodules) of a subclass whose `forward` is a function of its own.

    Dynamo keeps compiled code by code object and vLLM drops all guards; one code object for two depths would run
    whichever was compiled first. The name enters vLLM's cache key, so depths do not share an artifact on disk either.
    """
    base: Any = type(decoder)
    forward = base.forward
    name = f"{forward.__name__}_{_tag(layers, draft_weights)}"
    code = forward.__code__.replace(co_name=name, co_qualname=f"{base.__qualname__}.{name}")
    twin = types.FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    twin.__kwdefaults__, twin.__annotations__ = forward.__kwdefaults__, dict(forward.__annotations__)
    members = {"forward": twin, "__module__": base.__module__}
    view_class = type(f"{base.__name__}First{layers}Layers", (base,), members)
    view: nn.Module = object.__new__(view_class)
    view.__dict__.update(decoder.__dict__)
    return view


def _tag(layers: int, draft_weights: str) -> str:
    return f"first_{layers}_layers" + ("" if draft_weights == "shared" else f"_{draft_weights}")


def _compile_anew(trunk: nn.Module, layers: int, vllm_config: VllmConfig, draft_weights: str) -> None:
    """Give the view its own torch.compile wrapper instead of the target's."""
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    config = copy.copy(vllm_config)
    # Two depths of one model, or two kinds of weights, must not share an artifact in vLLM's compile cache.
    tag = _tag(layers, draft_weights)
    config.additional_config = {**vllm_config.additional_config, "selfspec_trunk": tag}
    state: dict[str, Any] = trunk.__dict__
    state.update(compiled=False, aot_compiled_fn=None, was_aot_compile_fn_loaded_from_disk=False, _compile_tag=tag)
    with set_model_tag(tag), set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(trunk)


def attention_names(trunk: nn.Module, vllm_config: VllmConfig, layers: int) -> set[str]:
    """Names, as the KV cache knows them, of the attention modules in the first `layers` layers."""
    modules = {id(module) for layer in trunk.layers[:layers] for module in layer.modules()}  # type: ignore[index]
    context = vllm_config.compilation_config.static_forward_context
    return {name for name, module in context.items() if id(module) in modules}


def has_experts(part: nn.Module) -> bool:
    """Whether a mixture of experts is in `part`."""
    return any("Experts" in type(module).__name__ or "MoE" in type(module).__name__ for module in part.modules())


def step_bytes(
    target: nn.Module, trunk: nn.Module, head: TargetHead, kv_cache: KVCacheConfig
) -> dict[str, float] | None:
    """Bytes read by one full step, and by one draft step through `trunk` and `head`, for what is bound by memory.

    Weights of the layers and the head, for the draft those that it runs on (8-bit copies where there are any);
    "..._kv_token": keys and values of one token of context. Embeddings are looked up, not read. None for a mixture of
    experts, whose step reads only some of its weights.
    """
    decoder, lm_head = decoder_of(target), language_model(target).lm_head
    parts: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
    if has_experts(decoder):
        return None
    layers: int = trunk.end_layer  # type: ignore[assignment]
    exit_layers: list[nn.Module] = list(trunk.layers)[:layers]  # type: ignore[arg-type]
    exit_parts = [*exit_layers, *([lm_head] if head.reads_lm_head else [])]
    groups = kv_cache.kv_cache_groups
    a_layer = groups[0].kv_cache_spec.page_size_bytes / groups[0].kv_cache_spec.block_size
    return {
        "full": weight_bytes([*parts, lm_head]),  # type: ignore[list-item]
        "draft": weight_bytes(exit_parts, head.tensors),  # type: ignore[arg-type]
        "full_kv_token": a_layer * len(parts),
        "draft_kv_token": a_layer * layers,
    }


def weight_bytes(modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that the weights of `modules`, and loose `tensors`, occupy: each storage and each submodule once.

    vLLM packs linear weights on the CPU into an opaque oneDNN buffer and empties the parameter; such a layer counts
    with the size that it had.
    """
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
    return int(part.output_size_per_partition * part.input_size_per_partition * weight.itemsize)
